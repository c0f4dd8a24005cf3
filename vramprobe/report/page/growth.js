// The book's recipes → peaks at a batch and length: as log/depth.py, log/shapes.py, log/pairing.py and
// predict/recipe_replay.py do in Python, and allocator/plain/ in WebAssembly. In: tools/page_book.py's lines. Sizes are bytes.

/** Bytes of the caching allocator's segments by default, and what stands for "none" in C. */
const LARGE_SEGMENT_BYTES = 20 * 1024 ** 2, NONE = -1;

const unbase64 = (text) => Uint8Array.from(atob(text.trim()), (one) => one.charCodeAt(0));

/** The book's index, with its lines still packed: {…index, recipe(number)}. */
async function openBook(base64) {
  const stream = new Blob([unbase64(base64)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const [first, ...lines] = (await new Response(stream).text()).split("\n");
  const index = JSON.parse(first), [numPhases, numStructures] = index.counts, structures = [], recipes = [];
  const structureOf = (number) => (structures[number] ??= structure(JSON.parse(lines[numPhases + number]), lines));
  return { ...index, recipe: (number) => {
    const [times, notes, rules] = JSON.parse(lines[numPhases + numStructures + number]);
    return (recipes[number] ??= { notes, rules, features: index.features, ...structureOf(index.entries[number][3]), times });
  } };
}

/** Phases of a structure with their events by slot; of each slot its kind, cause, stream and group. */
function structure([marks, places], lines) {
  const read = coder(), phases = [], kinds = [], causes = [], streams = [], groups = [];
  for (const place of places) {
    if (place < 0) { phases.push(phases[-1 - place]); continue; }
    const [[blocks, codes, rows, backs, ownCauses, ownStreams], ownGroups] = JSON.parse(lines[place]);
    const events = read(codes), first = Math.max(-1, ...groups) + 1;
    for (const back of backs) kinds.push(kinds.length - back);
    causes.push(...ownCauses);
    streams.push(...ownStreams);
    groups.push(...ownGroups.map((group) => first + group));
    phases.push({ blocks, events, ranks: rows.map((row) => unrolled(row, events.length)) });
  }
  return { marks, phases, kinds, causes, streams, groups };
}

/** Numbers → events: 1 plus the slot, negative for a free (tools/page_book.py, _Coder). */
function coder() {
  const latest = [], following = new Map();
  return (codes) => {
    let before = 0;
    return codes.flatMap((code) => Array.from({ length: Math.max(-code, 1) }, () => (before = event(code, before))));
  };
  function event(code, before) {
    const known = following.get(before);
    const at = code === 1 ? latest.length : code > 0 ? (code >> 1) - 1 : latest.indexOf(Math.abs(known) - 1);
    const slot = code === 1 ? at : latest.splice(at, 1)[0];
    const found = code < 0 ? known : code > 1 && code % 2 ? -1 - slot : slot + 1;
    latest.unshift(slot);
    following.set(before, found);
    return found;
  }
}

/** A row from pairs of how many zeros stand before a value, and the value. */
function unrolled(pairs, length) {
  const row = new Int32Array(length);
  for (let pair = 0, at = 0; pair < pairs.length; pair += 2) row[at += pairs[pair] + (pair > 0)] = pairs[pair + 1];
  return row;
}

/** The whole model's events in order, each phase's end, and each event's block (depth.py, Growth.at; pairing.py). */
function grown({ phases, kinds, times }) {
  const codes = [], blocks = [], stops = [], alive = kinds.map(() => []);
  let made = 0;
  for (const { blocks: repeated, events, ranks: [once, more, later] } of phases) {
    const add = (from, to, copy) => {
      for (let at = from; at < to; at += 1) {
        const event = events[at], same = alive[kinds[Math.abs(event) - 1]];
        codes.push(event);
        if (event > 0) same.push(made += 1);
        const rank = once[at] + more[at] * (times - 1) + later[at] * copy;
        blocks.push(event > 0 ? made : rank === 0 ? same.pop() : same.splice(-1 - rank, 1)[0]);
      }
    };
    let last = 0, start = events.length - repeated.reduce((sum, [, size]) => sum + size, 0);
    const end = start;
    for (const [position, size] of repeated) {
      add(last, position, 0);
      for (let copy = 0; copy < times; copy += 1) add(start, start + size, copy);
      [last, start] = [position, start + size];
    }
    add(last, end, 0);
    stops.push(codes.length);
  }
  return { codes: Int32Array.from(codes), blocks: Int32Array.from(blocks), stops, made };
}

const FEATURES = {
  "1": () => 1, rows: (rows) => rows, length: (rows, length) => length, tokens: (rows, length) => rows * length,
  scores: (rows, length) => rows * length * length, square: (rows, length) => length * length,
  tile: (rows, length) => Math.min(rows * (length - 1), 4096) };
const feature = (name, rows, length, number = Number(name.split(" ").at(-1))) => FEATURES[name]?.(rows, length) ?? rows
  * (name.startsWith("staged") ? Math.max(Math.floor(200 / (rows * number)), 1) : Math.ceil(length / number) * number);

/** Bytes of each slot at a shape (shapes.py, ShapeRules.sizes), with a card's own workspaces (recipe.py, _on_card). */
function sizesAt({ rules, groups, causes, features }, rows, length, [workspaces, recorded, own]) {
  const sizes = rules.map(([rule, ...factors]) => {
    const names = features[rule], sum = names.reduce((all, name, at) => all + factors[at] * feature(name, rows, length), 0);
    return Math.trunc(sum / (factors[names.length] ?? 1));
  });
  return Float64Array.from(groups, (group, slot) => (causes[slot] === workspaces && sizes[group] === recorded ? own : sizes[group]));
}

/** The allocator in WebAssembly: a function of a recipe, its sizes, the phases of training, and the allocator's settings,
 * to {retries, phases of {allocated, reserved, end}}; retries are below 0 where the limit does not hold what is needed. */
async function openAllocator(base64) {
  const { instance: { exports } } = await WebAssembly.instantiate(unbase64(base64));
  const view = (Kind, place, count) => new Kind(exports.memory.buffer, place, count);
  let loaded = null;

  /** Write a recipe's log where C reads it; the cache is emptied once, before the first phase of training. */
  function load(recipe, training) {
    const { codes, blocks, stops, made } = (recipe.log ??= grown(recipe));
    const address = exports.events(codes.length, stops.length, recipe.kinds.length, made);
    if (!address) throw new Error("this browser has no memory left for the replay");
    const [codesAt, blocksAt, stopsAt, streamsAt, sizesAt, peaksAt] = view(Uint32Array, address + 16, 6);
    for (const [place, values] of [[codesAt, codes], [blocksAt, blocks], [stopsAt, stops], [streamsAt, recipe.streams]]) {
      view(Int32Array, place, values.length).set(values);
    }
    return { recipe, sizesAt, peaksAt, stops, setup: recipe.marks.findIndex(([name]) => training.includes(name)) };
  }

  return (recipe, sizes, training, { limitBytes = NONE, largeSegmentBytes = LARGE_SEGMENT_BYTES, empties = true } = {}) => {
    if (loaded?.recipe !== recipe) loaded = load(recipe, training);
    const { stops, sizesAt, peaksAt, setup } = loaded;
    view(Float64Array, sizesAt, sizes.length).set(sizes);
    const retries = exports.replay(limitBytes, largeSegmentBytes, empties ? setup : NONE), peaks = view(Float64Array, peaksAt, 3 * stops.length);
    return { retries, phases: stops.map((_, at) => ({ allocated: peaks[3 * at], reserved: peaks[3 * at + 1], end: peaks[3 * at + 2] })) };
  };
}

/** What is alive at the highest moment of a phase by cause (depth.py, _memory). */
function causesAt({ causes, log: { codes, stops } }, sizes, phase, numCauses) {
  const start = phase ? stops[phase - 1] : 0;
  let running = 0, top = 0, stop = start;
  for (let at = start; at < stops[phase]; at += 1) {
    running += Math.sign(codes[at]) * sizes[Math.abs(codes[at]) - 1];
    if (running > top) [top, stop] = [running, at + 1];
  }
  const alive = new Array(numCauses).fill(0);
  for (let at = 0; at < stop; at += 1) {
    const slot = Math.abs(codes[at]) - 1;
    alive[causes[slot]] += Math.sign(codes[at]) * sizes[slot];
  }
  return alive;
}

/** The peaks of a recipe at a shape, and what is alive there (recipe_replay.py, replay_recipe; observation.py, peak_of). */
function replayed(book, allocator, recipe, [rows, length], { workspaceBytes: own = book.workspace_bytes, ...options } = {}) {
  const sizes = sizesAt(recipe, rows, length, [book.causes.indexOf("workspaces"), book.workspace_bytes, own]);
  const { retries, phases } = allocator(recipe, sizes, book.training, options);
  const named = phases.map((phase, at) => ({ ...phase, name: recipe.marks[at][0], step: recipe.marks[at][1], at }));
  const training = named.filter(({ name }) => book.training.includes(name));
  const highest = (list) => list.reduce((best, one) => (one.allocated > best.allocated ? one : best));
  const top = highest(training), load = highest(named.filter((one) => !training.includes(one)));
  return {
    retries, phases: named, peak: top, allocated: top.allocated, load: load.allocated,
    reserved: Math.max(...training.map(({ reserved }) => reserved)),
    causes: () => {
      const same = named.filter(({ name, step }) => name === top.name && step === top.step);
      const alive = causesAt(recipe, sizes, highest(same).at, book.causes.length);
      return Object.fromEntries(book.causes.map((cause, at) => [cause, alive[at]]));
    },
  };
}
