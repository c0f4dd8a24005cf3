// A cell and cards → predictions, verdicts, the largest counts, from the book's recipes; as predict/recipe_replay.py,
// predict/verdict.py and recipe/shipped.py have them in Python. Sizes are bytes.
const vramprobe = (() => {
  const text = (id) => byId(id).textContent, data = JSON.parse(text("page-data"));
  const LENGTH_STEP = 128, MOST = { batch_size: 4096, seq_len: 2 ** 20 / LENGTH_STEP };
  const kept = new Map(), axes = {};
  let book = null, allocator = null;
  async function open() {
    [book, allocator] = await Promise.all([openBook(text("book")), openAllocator(text("allocator"))]);
    Object.assign(axes, book.axes);
  }
  const shapeOf = ({ batch_size: rows, seq_len: length }) => [rows, length];
  const lengthsOf = (shapes) => [...new Set(shapes.map(([, length]) => length))];
  /** The cell's recipes of one row, or of several: the libraries take other branches. */
  function ofCell(cell, isOne) {
    const option = book.options.findIndex((one) => Object.entries(one).every(([name, value]) => cell[name] === value));
    const same = book.entries.map(([...own], number) => ({ number, own, shapes: own[2] })).filter(({ own }) => own[0] === cell.model && own[1] === option);
    return same.filter(({ shapes }) => shapes.every(([rows]) => rows === 1) === isOne);
  }

  /** How far a shape lies outside rows, lengths and tokens of those recorded, as factors; 0 inside. */
  function distance(shapes, shape) {
    const far = (count) => {
      const all = shapes.map(count), own = count(shape);
      return Math.max(Math.min(...all) / own, own / Math.max(...all), 1) - 1;
    };
    return far(([rows]) => rows) + far(([, length]) => length) + far(([rows, length]) => rows * length);
  }

  /** The recipe that is nearest to the cell's shape; null where none answers. */
  function entryOf(cell) {
    const shape = shapeOf(cell), isFor = (lengths) => lengths.length > 1 || lengths[0] === cell.seq_len;
    const able = ofCell(cell, cell.batch_size === 1).filter(({ shapes }) => isFor(lengthsOf(shapes)));
    return able.reduce((best, one) => (best && distance(best.shapes, shape) <= distance(one.shapes, shape) ? best : one), null);
  }

  function even(value) { // round() of Python: a tie goes to the even neighbor
    const below = Math.floor(value);
    return value - below === 0.5 ? below + (below % 2) : Math.round(value);
  }
  const around = (value, [low, high]) => ({ value, low: even(value * low), high: even(value * high) });
  /** The peaks of a cell on GPUs with such workspaces, their causes and notes; null where no recipe answers. */
  function predict(cell, workspaceBytes) {
    const entry = workspaceBytes && entryOf(cell);
    if (!entry) return null;
    const shape = shapeOf(cell), key = `${entry.number} ${shape} ${workspaceBytes}`;
    if (!kept.has(key)) kept.set(key, predicted(entry, shape, workspaceBytes));
    return kept.get(key);
  }

  function predicted({ number, shapes }, shape, workspaceBytes) {
    const recipe = book.recipe(number), { allocated, reserved, load, peak, causes } = replayed(book, allocator, recipe, shape, { workspaceBytes });
    return {
      allocated: around(allocated, data.ratios.allocated), reserved: around(reserved, data.ratios.reserved),
      card: data.like[workspaceBytes], phase: peak.name, label: `${peak.name} of step ${peak.step}`,
      terms: () => {
        const alive = Object.entries(causes()).filter(([, size]) => size);
        const left = allocated - alive.reduce((sum, [, size]) => sum + size, 0);
        return left > 0 ? [...alive, ["block_remainders", left]] : alive;
      },
      notes: [...recipe.notes, ...shapeNotes(shapes, shape, workspaceBytes), ...(load > allocated ? [`loading allocates the most, ${words.bytes(load)}`] : [])],
    };
  }

  function shapeNotes(shapes, shape, workspaceBytes) {
    const [first, last, here] = [shapes[0], shapes.at(-1), shape].map(([rows, length]) => `${rows} x ${words.count(length)}`);
    const ships = `a recipe that ships with vramprobe, of ${first} to ${last} tokens; --engine recipe records this very cell`;
    const cards = workspaceBytes === book.workspace_bytes ? [] : [`recorded on ${data.recorded_on}, with this GPU's cuBLAS workspaces in place of its own (docs/recipes.md)`];
    return [ships, ...cards, ...(distance(shapes, shape) > 0 ? [`${here} tokens lie outside: near, not exact`] : [])];
  }

  /** Whether the reserved memory fits: {verdict, needed, usable_bytes, basis, amounts}; null without a prediction. */
  function verdict(prediction, { usable_bytes: usable, basis }) {
    if (!prediction || usable === null) return null;
    const { reserved: needed } = prediction, upTo = needed.high > needed.value ? ` (up to ${words.bytes(needed.high)})` : "";
    const said = needed.value > usable ? "does not fit" : needed.high <= data.ratios.tight * usable ? "fits" : "tight";
    return { verdict: said, needed, usable_bytes: usable, basis, amounts: `${words.bytes(needed.value)}${upTo} of ${words.bytes(usable)}` };
  }
  const judge = (cell, gpu) => verdict(predict(cell, gpu.workspace_bytes), gpu);

  /** Counts that are looked through, as a function of 1, 2, …: lengths go by 128, or are those that were recorded. */
  function counts(cell, gpu, name) {
    if (name === "batch_size") return { at: (step) => step + Number(!predict({ ...cell, batch_size: 1 }, gpu.workspace_bytes)), most: MOST[name] };
    const same = ofCell(cell, cell.batch_size === 1), lengths = same.flatMap(({ shapes }) => lengthsOf(shapes)).sort((one, other) => one - other);
    const isAny = same.some(({ shapes }) => lengthsOf(shapes).length > 1);
    return isAny ? { at: (step) => step * LENGTH_STEP, most: MOST[name] } : { at: (step) => lengths[step - 1], most: lengths.length };
  }

  /** The largest batch_size or seq_len with the verdict "fits": a generator that pauses before each replay; returns null
   * where none does, and undefined where the recipes do not say. */
  function* largest(cell, gpu, name) {
    const { at, most } = counts(cell, gpu, name), target = data.ratios.tight * gpu.usable_bytes;
    let low = 0, high = most + 1, needs = [null, null], guess = 1, turn = 0;
    while (high - low > 1) {
      yield;
      const found = judge({ ...cell, [name]: at(guess) }, gpu);
      if (!found) return undefined;
      if (found.verdict === "fits") [low, needs[0]] = [guess, found.needed.high];
      else [high, needs[1]] = [guess, found.needed.high];
      const share = (target - needs[0]) / (needs[1] - needs[0]); // memory is nearly a line; a third of the turns halve
      const isLine = needs[0] !== null && needs[1] !== null && (turn += 1) % 3;
      const next = needs[1] === null ? 2 * low : isLine ? low + (high - low) * share : (low + high) / 2;
      guess = Math.min(Math.max(Math.floor(next), low + 1), high - 1);
    }
    return low ? at(low) : null;
  }

  /** The command that answers the same, and records what is missing. */
  function command(cell, gpu) {
    const flags = Object.keys(axes).filter((name) => name !== "method" && cell[name] !== false && cell[name] != null);
    const named = flags.map((name) => `--${name.replaceAll("_", "-")}${cell[name] === true ? "" : ` ${cell[name]}`}`);
    return [`vramprobe predict --engine recipe --model ${cell.model} --method ${cell.method} --batch-size ${cell.batch_size} --seq-len ${cell.seq_len}`,
      ...named, ...(gpu ? [`--gpu ${gpu.slug}`] : [])].join(" ");
  }

  /** Why no recipe answers, in one line. */
  function missing(cell, gpu) {
    if (gpu && !gpu.is_nvidia) return `No recipe: they are recorded with CUDA, and ${gpu.name} is not NVIDIA's.`;
    if (gpu && !gpu.workspace_bytes) return `No recipe is recorded for GPUs like ${gpu.name}.`;
    const lengths = ofCell(cell, cell.batch_size === 1).flatMap(({ shapes }) => lengthsOf(shapes));
    if (lengths.length) return `Of this cell, recipes of ${lengths.map(words.count).join(", ")} tokens are here, not of ${words.count(cell.seq_len)}.`;
    const options = Object.keys(axes).map((name) => (typeof cell[name] === "boolean" ? `${cell[name] ? "with" : "without"} ${words.plain(name)}` : cell[name]));
    return `No recipe of ${cell.model} (${[...options, cell.batch_size === 1 ? "one row" : "several rows"].join(", ")}) is in this page.`;
  }

  return { ...data, axes, open, predict, verdict, judge, largest, command, missing, models: () => new Set(book.entries.map(([model]) => model)),
    workspaceBytes: () => book.workspace_bytes, options: () => book.options };
})();
