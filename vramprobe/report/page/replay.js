// The cell on show through the allocator's replay, on no card and then on one after the other: tenths of a second each, so in
// a worker. In: an answer by arithmetic. Out: predictions and verdicts, handed over as they come. A newer cell ends the older's.
"use strict";

const replay = (() => {
  const PAUSE_MS = 150; // after the last change: who is typing is not kept waiting
  let worker = null, running = 0, isBusy = false, timer = 0, queue = [], sent = null, give = null;

  /** The question's answer, here or in the worker, which has the engine and this function alone. */
  function answered({ number, options, config, base, slug }) {
    const find = (wanted) => vramprobe.gpus.find((one) => one.slug === wanted) ?? null;
    try {
      const prediction = vramprobe.predict(vramprobe.resolve(options, config).spec, config, find(base), true);
      return { number, slug, prediction, verdict: slug === null ? null : vramprobe.verdict(prediction, find(slug)) };
    } catch (error) {
      if (!(error instanceof vramprobe.Refusal)) console.error(error);
      return { number, slug, prediction: null, verdict: null };
    }
  }

  function build() {
    const text = (id) => document.getElementById(id).textContent;
    const parts = ["self.engineData = ", text("engine-data"), ";\n", text("engine"), `\nconst answered = ${answered};\n`,
      "self.onmessage = ({ data }) => self.postMessage(answered(data));\n"];
    try {
      worker = new Worker(URL.createObjectURL(new Blob(parts, { type: "text/javascript" })));
    } catch {
      return; // a browser that has none for a page from a file
    }
    worker.onmessage = ({ data }) => received(data);
    worker.onerror = () => {
      worker = null;
      if (isBusy) send(sent);
    };
  }

  /**
   * Ask for the cell of `answer`, then for its verdicts on `gpus`, in this order; `hand(found, left)` takes what comes,
   * {slug, prediction, verdict}, and how many are still to come. Nothing comes of what no fit knows how to replay.
   */
  function show({ spec, config, prediction, base }, options, gpus, hand) {
    running += 1;
    give = hand;
    clearTimeout(timer);
    const able = prediction ? gpus.filter((gpu) => vramprobe.canReplay(spec, gpu)) : [];
    const first = prediction && vramprobe.canReplay(spec, base ?? null) ? [null] : [];
    const question = { number: running, options, config, base: base?.slug ?? null };
    queue = [...first, ...able.map((gpu) => gpu.slug)].map((slug) => ({ ...question, slug }));
    if (queue.length) timer = setTimeout(next, PAUSE_MS);
    return queue.length;
  }

  function next() {
    if (isBusy || !queue.length) return;
    isBusy = true;
    send(queue.shift());
  }

  function send(question) {
    sent = question;
    if (worker) worker.postMessage(question);
    else setTimeout(() => received(answered(question)), 0);
  }

  function received(found) {
    isBusy = false;
    if (found.number === running) give(found, queue.length);
    next();
  }

  return { build, show };
})();
