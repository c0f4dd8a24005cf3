// The page's one cycle: hash → state → form → answer → result, and back to the hash at each change.
(() => {
  const found = new Map(); // slug → largest counts of the cell on show, for when it is drawn again
  let now = null;

  async function start() {
    await vramprobe.open();
    chart.patterns();
    form.build();
    cards.build();
    tables.start();
    load();
    for (const event of ["input", "change"]) form.root.addEventListener(event, changed);
    form.root.addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", load);
    byId("reset").addEventListener("click", () => adopt(state.start()));
    byId("copy-link").addEventListener("click", (event) => copy(location.href, event.target));
    byId("copy-command").addEventListener("click", (event) => copy(byId("command").textContent, event.target));
    new ResizeObserver(() => requestAnimationFrame(redraw)).observe(byId("chart"));
    document.documentElement.dataset.ready = "true";
  }

  /** A link's state; a hash without `=` is a place in the page, not a state. */
  function load() {
    const hash = location.hash.slice(1);
    if (now && hash && !hash.includes("=")) return remember();
    if (now && hash === state.encode(now)) return;
    const { state: linked, problems } = state.decode(hash.includes("=") ? hash : "");
    byId("link-problems").textContent = problems.join("; ");
    byId("link-problems").hidden = !problems.length;
    adopt(linked);
  }

  function adopt(next) {
    form.write(next);
    changed();
  }

  const take = (change) => adopt({ ...now, cell: { ...now.cell, ...change } });

  function changed() {
    const next = form.read();
    if (JSON.stringify(next) === JSON.stringify(now)) return;
    now = next;
    remember();
    found.clear();
    const answer = ask(now);
    delete byId("changes").dataset.done;
    byId("changes-basis").textContent = "";
    result.show(answer);
    cards.show(answer.isWrong ? null : now.cell, now.cards, () => changes(answer), (slug, counts) => {
      found.set(slug, counts);
      result.showLargest(slug, counts, take);
    });
  }

  function remember() {
    const hash = state.encode(now);
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  /** {cell, gpu, prediction, verdicts} by the smallest chosen card with a recipe, else by any; or {message}. */
  function ask({ cell, cards: chosen }) {
    const wrong = form.follow(now);
    if (wrong) return { cell, message: wrong, isWrong: true };
    const gpus = vramprobe.gpus.filter(({ slug, usable_bytes: usable }) => usable && chosen.includes(slug)).sort((one, other) => one.memory_bytes - other.memory_bytes);
    const verdicts = gpus.map((gpu) => ({ gpu, prediction: vramprobe.predict(cell, gpu.workspace_bytes), verdict: vramprobe.judge(cell, gpu) }));
    const prediction = verdicts.find((one) => one.prediction)?.prediction ?? onAny(cell);
    const gpu = (verdicts.find(({ verdict }) => verdict) ?? verdicts[0])?.gpu;
    return prediction ? { cell, gpu, prediction, verdicts } : { cell, gpu, message: vramprobe.missing(cell, gpus.find((one) => one.workspace_bytes)) };
  }

  /** Predicted on this GPU, or without one on that of the recipes. */
  const onAny = (cell, gpu) => vramprobe.predict(cell, gpu ? gpu.workspace_bytes : vramprobe.workspaceBytes());

  /** The same model under the book's other options, for the smallest card that it does not fit, or the smallest. */
  function* changes({ cell, prediction, verdicts = [] }) {
    const aim = verdicts.find(({ verdict }) => verdict && verdict.verdict !== "fits") ?? verdicts.find(({ verdict }) => verdict), tried = [];
    for (const options of vramprobe.options()) {
      yield;
      const own = onAny({ ...cell, ...options }, aim?.gpu), change = Object.fromEntries(Object.entries(options).filter(([name, value]) => cell[name] !== value));
      if (!own || !Object.keys(change).length) continue;
      const needed = own.reserved.value, before = (aim?.prediction ?? prediction)?.reserved.value;
      tried.push({ change, needed, saved: before && before - needed, verdict: aim && vramprobe.verdict(own, aim.gpu).verdict });
    }
    byId("changes-basis").textContent = !tried.length ? "No other options of this model are recorded." : aim ? `Reserved memory, and the verdict on ${aim.gpu.name}.` : "Reserved memory.";
    for (const one of tried.sort((one, other) => one.needed - other.needed)) result.addChange(one, take);
    byId("changes").dataset.done = "true";
  }

  function redraw() {
    result.draw();
    for (const [slug, counts] of found) result.showLargest(slug, counts, take);
  }

  function copy(text, button) {
    const before = (button.dataset.label ??= button.textContent);
    navigator.clipboard.writeText(text).then(() => "Copied", () => "Copy it by hand").then((said) => { button.textContent = said; });
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  start().catch((error) => {
    byId("link-problems").textContent = `The calculator did not start (${error.message}); the tables below need no script.`;
    byId("link-problems").hidden = false;
    throw error;
  });
})();
