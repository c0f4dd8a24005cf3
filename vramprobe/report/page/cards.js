// The table of every GPU: verdict, share, largest batch and length; the last two and other options are worked out while
// nobody waits. In: a cell. Out: cells of the table changed in place. A newer cell ends the older's work.
const cards = (() => {
  const { element } = words, table = byId("gpus-rows"), rows = new Map();
  const PAUSE_MS = 120, SLICE_MS = 12; // after the last change; of work between two looks at what the user does
  let running = 0;

  function build() {
    for (const { slug, name, price, memory_bytes: size } of vramprobe.gpus) {
      const cells = Object.fromEntries(["verdict", "share", "batch_size", "seq_len"].map((one) => [one, element("td", { class: one === "verdict" ? null : "number" })]));
      rows.set(slug, cells);
      table.tBodies[0].append(element("tr", { "data-gpu": slug }, element("th", { scope: "row" }, name), ...Object.values(cells),
        element("td", { class: "number" }, size ? words.gib(size) : "–"), element("td", { class: "number", title: price?.source }, price ? price.usd_per_hour.toFixed(2) : "–")));
    }
    tables.filter("gpus-rows");
  }

  function write(cell, text, sort = "") {
    cell.replaceChildren(text);
    cell.dataset.sort = String(sort);
  }

  /** Verdicts at once; then `work`, and the largest counts, the chosen cards first, each handed to `tell(slug, counts)`. */
  function show(cell, chosen, work, tell) {
    const number = (running += 1), asked = [];
    delete table.dataset.done;
    for (const gpu of vramprobe.gpus) {
      const verdict = cell && vramprobe.judge(cell, gpu), own = rows.get(gpu.slug);
      for (const name of ["batch_size", "seq_len"]) write(own[name], verdict ? "…" : "–");
      const none = gpu.usable_bytes === null ? "memory not known" : cell ? "no recipe" : "–";
      write(own.verdict, verdict ? result.badge(verdict.verdict) : none, verdict ? ["fits", "tight", "does not fit"].indexOf(verdict.verdict) : 3);
      const share = verdict ? (100 * verdict.needed.value) / verdict.usable_bytes : null;
      write(own.share, share === null ? "–" : share.toFixed(0), share ?? "");
      if (verdict) asked.push(gpu);
    }
    tables.again(table);
    const order = [...asked.filter(({ slug }) => chosen.includes(slug)), ...asked.filter(({ slug }) => !chosen.includes(slug))];
    setTimeout(step, PAUSE_MS, number, all(cell, order, work, tell));
  }

  function* all(cell, gpus, work, tell) {
    for (const gpu of gpus) {
      const found = {};
      for (const name of ["batch_size", "seq_len"]) {
        found[name] = yield* vramprobe.largest(cell, gpu, name);
        write(rows.get(gpu.slug)[name], found[name] ? words.count(found[name]) : "–", found[name] ?? "");
      }
      tell(gpu.slug, found);
      if (gpu === gpus[0]) yield* work();
    }
    if (!gpus.length) yield* work();
  }

  function step(number, job) {
    for (const until = performance.now() + SLICE_MS; number === running && performance.now() < until;) {
      if (!job.next().done) continue;
      tables.again(table);
      table.dataset.done = String(number);
      return;
    }
    if (number === running) setTimeout(step, 0, number, job);
  }

  return { build, show };
})();
