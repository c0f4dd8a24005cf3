// A prediction, or why there is none → the words, the bar, the cards' verdicts, the terms, the command.
// In: what the engine answered. Out: the page's elements. Never computes a number.
"use strict";

const result = (() => {
  const { element, bytes, plain } = words;
  const byId = (id) => document.getElementById(id);
  const SIGNS = { fits: "✓", tight: "≈", "does not fit": "✕" };
  let drawn = null; // what was drawn last, to draw it again at another width

  /** Show `answer`: {spec, prediction, verdicts} or {message}. `cards`: the chosen ones, in the order of the list. */
  function show(answer) {
    drawn = answer;
    const { prediction, message } = answer;
    byId("result").classList.toggle("empty", !prediction);
    byId("no-prediction").hidden = Boolean(prediction);
    byId("no-prediction").textContent = message ?? "";
    if (!prediction) clear();
    else fill(answer);
    bottomBar(answer);
    speak(answer);
  }

  function clear() {
    for (const id of ["interval", "where", "basis", "changes-basis", "command", "command-hint"]) byId(id).textContent = "";
    byId("peak").textContent = "No prediction";
    for (const id of ["chart", "verdicts", "changes", "notes"]) byId(id).replaceChildren();
    byId("terms").tBodies[0].replaceChildren();
    byId("copy-command").disabled = true;
  }

  function fill(answer) {
    const { spec, prediction } = answer, peak = prediction.peak_allocated_bytes;
    byId("peak").textContent = bytes(peak.value);
    byId("interval").textContent = `${bytes(peak.low)} to ${bytes(peak.high)}`;
    const tiers = [["reserved", prediction.reserved_bytes], ["device", prediction.device_bytes]]
      .filter(([, tier]) => tier).map(([name, tier]) => `${bytes(tier.value)} ${name} (${bytes(tier.low)} to ${bytes(tier.high)})`);
    const onEach = prediction.cards ? " on the fullest GPU" : spec.num_gpus > 1 ? " on each GPU" : "";
    byId("where").textContent = [`allocated${onEach} at the peak, in ${plain(prediction.peak_phase)}${place(prediction)}`, ...tiers].join("; ");
    draw();
    terms(prediction);
    const isKnown = !vramprobe.fits.some((one) => one.model.device === "cuda"); // said above the peak: no GPU was measured
    const notes = prediction.notes.filter((note) => !(isKnown && note.startsWith("arithmetic alone")));
    byId("notes").replaceChildren(...notes.map((note) => element("p", { class: "note" }, element("b", {}, "Note: "), ...words.linked(note))));
    byId("command").replaceChildren(...wrapped(vramprobe.command(spec)));
    byId("copy-command").disabled = false;
    const cannot = spec.num_gpus > 1 ? "to measure it, vramprobe measure takes as many GPUs, or --emulate" : spec.stack ? "to measure it takes those libraries" : "";
    byId("command-title").textContent = cannot ? "Ask the command line" : "Verify it yourself";
    const saved = spec.model === state.PASTED ? " Save the pasted config as config.json first." : "";
    byId("command-hint").textContent = (cannot ? `Predicts the same: ${cannot}.`
      : "Runs this cell on your GPU and shows what was measured.") + saved;
  }

  /** The command in pieces that are not broken within: an option stays with its value. */
  function wrapped(command) {
    return command.split(/ (?=--)/).flatMap((piece, index) => [index ? " " : "", element("span", {}, piece)]);
  }

  /** Say that `count` answers by the allocator's replay are still to come; 0: all that is shown stays. */
  function awaitReplay(count) {
    const waits = count > 0;
    byId("replay-state").textContent = waits ? "By arithmetic alone so far; the caching allocator's replay is under way …" : "";
    byId("result").toggleAttribute("data-replayed", !waits);
  }

  const place = ({ peak_place: where, peak_phase: phase }) => (where && where !== phase ? ` (${where})` : "");

  /** The bar and the tracks, as wide as their place is now. */
  function draw() {
    if (!drawn?.prediction) return;
    const { prediction, verdicts } = drawn, width = byId("chart").clientWidth;
    if (width < 1) return;
    const scale = chart.scaleOf(prediction, verdicts.map(({ verdict }) => verdict.usable_bytes));
    byId("chart").replaceChildren(chart.bar(width, prediction, scale, verdicts));
    byId("verdicts").replaceChildren(...verdicts.map((one) => card(one, width, prediction, scale, words.basis(verdicts[0].verdict))));
    byId("basis").textContent = verdicts.length ? words.basis(verdicts[0].verdict) : ""; // another card's, where it differs, beside it
    if (!verdicts.length) byId("verdicts").append(element("li", { class: "soft" }, "No GPU is chosen."));
  }

  function badge(verdict) {
    return element("span", { class: `verdict ${verdict.replaceAll(" ", "-")}` },
      element("span", { "aria-hidden": "true" }, SIGNS[verdict]), ` ${verdict}`);
  }

  function card({ gpu, verdict }, width, prediction, scale, basis) {
    const own = words.basis(verdict) === basis ? "" : `${words.basis(verdict)}: `;
    const row = element("li", { "data-gpu": gpu.slug },
      element("p", { class: "card" }, element("b", {}, gpu.name), badge(verdict.verdict)),
      element("p", { class: "reason" }, element("span", {}, own + words.amounts(verdict)), element("span", { class: "largest" }, "…")));
    row.querySelector(".card").after(chart.track(width, prediction, verdict, scale));
    return row;
  }

  /** The largest batch and length on a chosen card, each a button that takes it over. */
  function showLargest(slug, largest, take) {
    const place = byId("verdicts").querySelector(`[data-gpu="${CSS.escape(slug)}"] .largest`);
    if (!place) return;
    if (largest.message) {
      place.textContent = largest.message;
      return;
    }
    const button = (option, value, label) => {
      const made = element("button", { type: "button", class: "take", title: `Take it: ${plain(option)} ${value}` }, words.count(value));
      made.addEventListener("click", () => take(option, value));
      return [`${label} `, made];
    };
    const { batch_size: batch, seq_len: length } = largest;
    const shown = drawn?.verdicts?.find(({ gpu }) => gpu.slug === slug)?.verdict;
    const how = largest.isAwaited ? ["by arithmetic so far, the replay is looking: "] : []; // a dozen replays take seconds
    const none = shown?.verdict === "does not fit" ? "fits" : "leaves room to spare"; // what is tight is in, but not by much
    place.replaceChildren(
      ...how, ...(batch ? button("batch_size", batch, "largest batch") : [`no batch ${none}`]), ", ",
      ...(length ? button("seq_len", length, "largest length")
        : [length === null ? `no length ${none}` : "the longest is not looked for where GPUs share each sequence"]));
  }

  function terms(prediction) {
    const parts = chart.segments(prediction), total = parts.reduce((sum, [, size]) => sum + size, 0);
    byId("terms").tBodies[0].replaceChildren(...parts.map(([name, size]) => element("tr", {},
      element("th", { scope: "row" }, chart.swatch(name), element("span", {}, plain(name), element("small", {}, vramprobe.meanings[name] ?? ""))),
      element("td", { class: "number" }, bytes(size)), element("td", { class: "number soft" }, words.percent(size / total)))));
  }

  /** On a phone, the answer stays in sight while the form is changed. */
  function bottomBar({ prediction, verdicts, message }) {
    byId("bar-peak").textContent = prediction ? bytes(prediction.peak_allocated_bytes.value) : "–";
    const first = ["fits", "tight"].map((said) => verdicts?.find(({ verdict }) => verdict.verdict === said)).find(Boolean);
    const none = verdicts?.length ? `does not fit the ${verdicts.length} chosen` : "";
    byId("bar-verdict").textContent = first ? `${first.verdict.verdict} ${first.gpu.name}` : message ? "see why" : none;
  }

  let timer = 0;
  /** Said once the user pauses, so that a screen reader is not flooded. */
  function speak({ prediction, verdicts, message }) {
    clearTimeout(timer);
    const peak = prediction?.peak_allocated_bytes;
    const text = prediction
      ? [`Predicted peak ${bytes(peak.value)}, from ${bytes(peak.low)} to ${bytes(peak.high)}`,
        ...verdicts.map(({ gpu, verdict }) => `${gpu.name}: ${verdict.verdict}`)].join(". ")
      : `No prediction: ${message}`;
    timer = setTimeout(() => { byId("spoken").textContent = text; }, 500);
  }

  return { badge, wrapped, show, await: awaitReplay, draw, showLargest };
})();
