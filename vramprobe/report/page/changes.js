// What one change of the cell would save, and whether it fits then; if none is enough, the mildest that together are.
// In: options and their prediction. Out: a list of buttons, each a change to take over. Never computes memory.
"use strict";

const changes = (() => {
  const { element, bytes } = words;
  const byId = (id) => document.getElementById(id);
  const PAUSE_MS = 200; // after the last change, and after the chosen cards' own answers
  const SLICE_MS = 12;
  let running = 0;

  /** A change in the form's own words. */
  const shown = (change) => Object.entries(change).map(([name, value]) => {
    const label = (document.querySelector(`label[for=${name}]`) ?? document.querySelector(`[data-option=${name}] legend`)).textContent;
    return value === true ? label : value === null ? `${label}: off` : `${label}: ${typeof value === "number" ? words.count(value) : value}`;
  }).join("; ");

  /** {change, options, needed, verdict} of other options; null where they cannot be, or change nothing. */
  function tried(change, options, job) {
    const next = { ...options, ...change };
    if (change.sharding && !vramprobe.hybrid.includes(change.sharding)) next.shard_size = null; // of groups alone
    try {
      const { spec, errors } = vramprobe.resolve(next, job.config);
      if (errors.length) return null;
      const prediction = vramprobe.predict(spec, job.config, job.gpu);
      const verdict = job.gpu ? vramprobe.verdict(prediction, job.gpu) : null;
      return { change, options: next, verdict, needed: chart.needed(prediction).value };
    } catch (error) {
      if (error instanceof vramprobe.Refusal) return null; // what cannot be predicted is no advice
      throw error;
    }
  }

  let last = null; // what is shown, to show it for another card
  let asked = null; // the card that the user chose here
  function build() {
    byId("changes-card").addEventListener("change", () => {
      asked = byId("changes-card").value;
      show(...last);
    });
  }

  /** For the card that was asked for, or the smallest that the cell does not fit, or the smallest. */
  function show(answer, options, take) {
    const { spec, config, prediction, verdicts = [] } = answer;
    last = [answer, options, take];
    running += 1;
    byId("changes-basis").textContent = prediction ? "…" : "";
    byId("changes").replaceChildren();
    delete byId("changes").dataset.done;
    const aim = verdicts.find(({ gpu }) => gpu.slug === asked) ?? verdicts.find(({ verdict }) => verdict.verdict !== "fits") ?? verdicts[0];
    byId("changes-card").replaceChildren(...verdicts.map(({ gpu }) => element("option", { value: gpu.slug }, gpu.name)));
    byId("changes-card").value = aim?.gpu.slug ?? "";
    byId("changes-on").hidden = !aim;
    if (!prediction) return;
    const now = { needed: chart.needed(onCard(answer, aim?.gpu)).value, fits: aim?.verdict.verdict === "fits" };
    const job = { spec, config, options, now, take, gpu: aim?.gpu ?? null, number: running, found: [], queue: vramprobe.candidates(spec) };
    setTimeout(work, PAUSE_MS, job);
  }

  /** What is predicted on this card, whose fit and kernels may be its own; where it cannot run there, on others. */
  function onCard({ spec, config, prediction }, gpu) {
    try {
      return gpu ? vramprobe.predict(spec, config, gpu) : prediction;
    } catch (error) {
      if (error instanceof vramprobe.Refusal) return prediction;
      throw error;
    }
  }

  function work(job) {
    if (job.number !== running) return;
    const until = performance.now() + SLICE_MS;
    while (job.queue.length && performance.now() < until) {
      const one = tried(job.queue.shift(), job.options, job);
      if (one && one.needed < (1 - vramprobe.leastShare) * job.now.needed) job.found.push(one);
    }
    if (job.queue.length) setTimeout(work, 0, job);
    else if (job.gpu && !job.now.fits && !job.found.some(fits)) setTimeout(together, 0, job, null, [...job.found]);
    else write(job, null);
  }

  const fits = (one) => one.verdict?.verdict === "fits";

  /** One change after the other, the mildest first, each kept if it saves beside those before, until it fits. */
  function together(job, sum, left) {
    if (job.number !== running) return;
    const until = performance.now() + SLICE_MS;
    while (left.length && !(sum && fits(sum)) && performance.now() < until) {
      const { change } = left.shift();
      const next = tried({ ...sum?.change, ...change }, job.options, job);
      if (next && next.needed < (1 - vramprobe.leastShare) * (sum?.needed ?? job.now.needed)) sum = next;
    }
    if (left.length && !(sum && fits(sum))) setTimeout(together, 0, job, sum, left);
    else if (sum && fits(sum)) setTimeout(needed, 0, job, sum, Object.keys(sum.change));
    else write(job, sum);
  }

  /** Of changes that fit together, each that is not needed for it goes, the harshest first. */
  function needed(job, sum, names) {
    if (job.number !== running) return;
    if (!names.length) return write(job, sum);
    const { [names.pop()]: _, ...fewer } = sum.change, next = tried(fewer, job.options, job);
    setTimeout(needed, 0, job, next && fits(next) ? next : sum, names);
  }

  function write(job, sum) {
    const { gpu, now } = job;
    const found = job.found.sort((one, other) => one.needed - other.needed);
    const rows = [...(sum && Object.keys(sum.change).length > 1 ? [sum] : []), ...found];
    byId("changes").replaceChildren(...rows.map((one) => row(one, job)));
    const how = vramprobe.canReplay(job.spec, gpu) ? "By arithmetic alone. " : ""; // the replay is too slow for dozens of answers
    const enough = rows.some(fits) ? "" : " None of them is enough.";
    byId("changes-basis").textContent = how + (!rows.length ? "Nothing that was tried saves more."
      : gpu ? `${now.fits ? "It fits as it is." : "Each line by itself; a click takes it over."}${now.fits ? "" : enough}` : "Each line by itself; a click takes it over.");
    byId("changes").dataset.done = String(job.number);
  }

  function row({ change, options, needed, verdict }, { now, take }) {
    const button = element("button", { type: "button", class: "take" }, shown(change));
    button.addEventListener("click", () => take(options, Object.keys(change)[0]));
    return element("li", {}, button, element("span", { class: "number" }, `${bytes(needed)}, ${bytes(now.needed - needed)} less`),
      ...(verdict ? [result.badge(verdict.verdict)] : []));
  }

  return { build, show };
})();
