// The table of every GPU: verdict, share, largest batch and length; the last two are worked out while nobody waits, by arithmetic
// until the replay's are handed over.
// In: a spec and its prediction. Out: cells changed in place. One search at a time: a newer cell ends the older's.
"use strict";

const cards = (() => {
  const { element, gib } = words;
  const table = document.getElementById("gpus-rows");
  const rows = new Map();
  const PAUSE_MS = 120; // after the last change: who is typing is not slowed down
  const SLICE_MS = 12; // of work between two looks at what the user does
  let running = 0, job = null;

  function build() {
    for (const gpu of vramprobe.gpus) {
      const price = gpu.price;
      const cells = {
        verdict: element("td"), share: element("td", { class: "number" }),
        batch: element("td", { class: "number" }), length: element("td", { class: "number" }),
      };
      const row = element("tr", { "data-gpu": gpu.slug }, element("th", { scope: "row" }, gpu.name),
        ...Object.values(cells), element("td", { class: "number" }, gpu.memory_bytes ? gib(gpu.memory_bytes) : "–"),
        element("td", { class: "number", title: price?.source ?? null }, price ? price.usd_per_hour.toFixed(2) : "–"));
      rows.set(gpu.slug, cells);
      table.tBodies[0].append(row);
    }
    tables.filter("gpus-rows");
  }

  /** Verdicts at once; then the largest counts, the chosen cards first, each handed to `onLargest(slug, found)`. */
  function show({ spec, config, prediction }, chosen, onLargest) {
    running += 1;
    for (const state of ["judged", "counted", "done"]) delete table.dataset[state];
    for (const gpu of vramprobe.gpus) verdictOf(gpu, prediction);
    tables.again(table);
    if (!prediction) return;
    const known = vramprobe.gpus.filter((gpu) => gpu.memory_bytes);
    const queue = [...known.filter((gpu) => chosen.includes(gpu.slug)), ...known.filter((gpu) => !chosen.includes(gpu.slug))];
    job = { spec, config, onLargest, number: running, seen: new Map(), counted: new Set() };
    setTimeout(search, PAUSE_MS, queue, job);
  }

  function verdictOf(gpu, prediction) {
    const cells = rows.get(gpu.slug);
    for (const name of ["batch", "length"]) write(cells[name], prediction && gpu.memory_bytes ? "…" : "–");
    if (!prediction || !gpu.memory_bytes) {
      write(cells.verdict, gpu.memory_bytes ? "–" : "memory not known", gpu.memory_bytes ? "" : 3);
      write(cells.share, "–");
      return;
    }
    writeVerdict(cells, vramprobe.verdict(prediction, gpu));
  }

  function writeVerdict(cells, verdict) {
    const order = ["fits", "tight", "does not fit"].indexOf(verdict.verdict);
    cells.verdict.replaceChildren(result.badge(verdict.verdict));
    cells.verdict.dataset.sort = String(order);
    const share = (100 * verdict.needed.value) / verdict.usable_bytes;
    write(cells.share, share.toFixed(0), share);
  }

  /** The verdict by the replay, once it is there. */
  function judge(slug, verdict) {
    writeVerdict(rows.get(slug), verdict);
  }

  /** The largest counts by the replay, once they are there. */
  function count(slug, largest) {
    job.counted.add(slug);
    writeLargest(slug, { ...largest, isReplayed: true }, job);
  }

  /** All verdicts (`judged`), or all counts (`counted`), are as they stay. */
  function end(state) {
    if (table.dataset[state] === String(running)) return;
    tables.again(table);
    table.dataset[state] = String(running);
  }

  function search(queue, job) {
    if (job.number !== running) return;
    const until = performance.now() + SLICE_MS;
    while (queue.length && performance.now() < until) {
      const gpu = queue.shift();
      if (job.counted.has(gpu.slug)) continue;
      writeLargest(gpu.slug, { ...largestOf(gpu, job), isAwaited: vramprobe.canReplay(job.spec, gpu) }, job);
    }
    if (queue.length) setTimeout(search, 0, queue, job);
    else {
      tables.again(table);
      table.dataset.done = String(job.number);
    }
  }

  function writeLargest(slug, largest, job) {
    const cells = rows.get(slug), more = largest.isAwaited ? " …" : "";
    for (const [name, option] of [["batch", "batch_size"], ["length", "seq_len"]]) {
      write(cells[name], (largest[option] ? words.count(largest[option]) : "–") + more, largest[option] ?? "");
    }
    job.onLargest(slug, largest);
  }

  /** Of cards with the same memory and kernels, which have the same answer, the first is asked about. */
  function largestOf(gpu, { spec, config, seen }) {
    const alike = vramprobe.hasFit(spec, gpu) ? gpu.slug : `${gpu.memory_bytes} ${gpu.kernels} ${gpu.blas_workspace_bytes}`; // cards that are told apart by nothing else
    if (!seen.has(alike)) {
      let found;
      try {
        found = vramprobe.largest(spec, config, gpu);
      } catch (error) {
        found = { batch_size: null, seq_len: null, message: error.message };
      }
      seen.set(alike, found);
    }
    return seen.get(alike);
  }

  function write(cell, text, sort = "") {
    cell.textContent = text;
    if (sort === "") delete cell.dataset.sort;
    else cell.dataset.sort = String(sort);
  }

  return { build, show, judge, count, end };
})();
