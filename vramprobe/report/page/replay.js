// The cell on show through the allocator's replay, tenths of a second each, so in a worker: on no card and then on one after the
// other, and the largest counts on each, which take a dozen replays. In: an answer by arithmetic. Out: what is found, handed
// over as it comes. A newer cell ends the older's.
"use strict";

const replay = (() => {
  const PAUSE_MS = 150; // after the last change: who is typing is not kept waiting
  /** What is asked, in this order: of the chosen cards, then of all others, whose counts are looked for while they are seen. */
  const STAGES = ["shown", "largest", "others", "othersLargest"];
  const SEEN_STAGES = ["shown", "others", "largest", "othersLargest"];
  let worker = null, running = 0, isBusy = false, isSeen = false, timer = 0, queue = [], sent = null, give = null;

  /** The question's answer, here or in the worker, which has the engine and this function alone. */
  function answered({ number, stage, options, config, base, slug }) {
    const find = (wanted) => vramprobe.gpus.find((one) => one.slug === wanted) ?? null;
    const isOfCounts = stage.toLowerCase().endsWith("largest"), nothing = { number, stage, slug, prediction: null, verdict: null, largest: null };
    try {
      const { spec } = vramprobe.resolve(options, config);
      if (isOfCounts) {
        const largest = vramprobe.lookForLargest(spec, config, find(slug));
        return { ...nothing, largest, isUnfinished: largest === null };
      }
      const prediction = vramprobe.predict(spec, config, find(base), true);
      return { ...nothing, prediction, verdict: slug === null ? null : vramprobe.verdict(prediction, find(slug)) };
    } catch (error) {
      if (!(error instanceof vramprobe.Refusal)) console.error(error);
      return nothing;
    }
  }

  /** `table`: of all cards; the largest counts of those that are not chosen are looked for while it is in sight. */
  function build(table) {
    const text = (id) => document.getElementById(id).textContent;
    const parts = ["self.engineData = ", text("engine-data"), ";\n", text("engine"), `\nconst answered = ${answered};\n`,
      "self.onmessage = ({ data }) => self.postMessage(answered(data));\n"];
    new IntersectionObserver((seen) => {
      isSeen = seen.at(-1).isIntersecting;
      next();
    }).observe(table);
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
   * Ask for the cell of `answer`, then for its verdicts and largest counts on `chosen` and on `others`; `hand(found, left)`
   * takes what comes, {stage, slug, prediction, verdict, largest}, and how many are still to come at each stage. Says how
   * many it asks. Nothing comes of what no fit knows how to replay.
   */
  function show({ spec, config, prediction, base }, options, chosen, others, hand) {
    running += 1;
    give = hand;
    clearTimeout(timer);
    const able = (gpus) => (prediction ? gpus.filter((gpu) => vramprobe.canReplay(spec, gpu)).map((gpu) => gpu.slug) : []);
    const first = prediction && vramprobe.canReplay(spec, base ?? null) ? [null] : [];
    const asked = { shown: [...first, ...able(chosen)], largest: able(chosen), others: able(others), othersLargest: able(others) };
    const question = { number: running, options, config, base: base?.slug ?? null };
    queue = STAGES.flatMap((stage) => asked[stage].map((slug) => ({ ...question, stage, slug })));
    if (queue.length) timer = setTimeout(next, PAUSE_MS);
    return left();
  }

  const left = () => Object.fromEntries(STAGES.map((stage) => [stage, queue.filter((one) => one.stage === stage).length]));

  function next() {
    if (isBusy) return;
    const stage = (isSeen ? SEEN_STAGES : STAGES).find((one) => queue.some((question) => question.stage === one));
    if (stage === undefined || (stage === "othersLargest" && !isSeen)) return;
    isBusy = true;
    const [question] = queue.splice(queue.findIndex((one) => one.stage === stage), 1);
    send(question);
  }

  function send(question) {
    sent = question;
    if (worker) worker.postMessage(question);
    else setTimeout(() => received(answered(question)), 0);
  }

  /** What is not finished goes to the front again, so that another cell, or the table once it is in sight, comes between. */
  function received(found) {
    isBusy = false;
    if (found.number === running) {
      if (found.isUnfinished) queue.unshift(sent);
      else give(found, left());
    }
    next();
  }

  return { build, show };
})();
