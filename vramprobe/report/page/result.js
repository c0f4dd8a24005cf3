// A prediction, or why there is none → the words, the bar, the cards' verdicts, the causes, other options, the command.
// In: what answer.js said. Out: the page's elements. Never computes memory.
const result = (() => {
  const { element, bytes, plain } = words, SIGNS = { fits: "✓", tight: "≈", "does not fit": "✕" };
  let drawn = null, timer = 0;

  /** Show `answer`: {cell, prediction, verdicts} or {cell, message}; the command stands in both. */
  function show(answer) {
    drawn = answer;
    const { cell, prediction, message, gpu } = answer;
    byId("result").classList.toggle("empty", !prediction);
    byId("no-prediction").hidden = Boolean(prediction);
    byId("no-prediction").textContent = message ?? "";
    byId("peak").textContent = prediction ? bytes(prediction.allocated.value) : "No prediction";
    byId("interval").textContent = prediction ? `${bytes(prediction.allocated.low)} to ${bytes(prediction.allocated.high)}` : "";
    const { reserved, phase, label, card } = prediction ?? {};
    byId("where").textContent = prediction ? `allocated at the peak on GPUs like ${card}, in ${plain(phase)} (${plain(label)}); ${bytes(reserved.value)} reserved (${bytes(reserved.low)} to ${bytes(reserved.high)})` : "";
    byId("terms").tBodies[0].replaceChildren(...(prediction ? causes(prediction) : []));
    byId("notes").replaceChildren(...(prediction?.notes ?? []).map((note) => element("p", { class: "note" }, element("b", {}, "Note: "), note)));
    const command = answer.isWrong ? "" : vramprobe.command(cell, gpu);
    byId("command").replaceChildren(...command.split(/ (?=--)/).flatMap((piece, index) => [index ? " " : "", element("span", {}, piece)]));
    byId("copy-command").disabled = !command;
    byId("command-title").textContent = prediction ? "Ask the command line" : "Record it";
    byId("command-hint").textContent = prediction ? "Answers from the same recipe, or records this very cell where vramprobe emulate setup has been run; vramprobe measure runs it on your GPU."
      : "Records this cell without a GPU (Linux, vramprobe emulate setup once) and answers, in about a minute.";
    for (const id of ["chart", "verdicts", "changes"]) byId(id).replaceChildren();
    draw();
    speak(answer);
  }

  /** The bar and the tracks, as wide as their place is now. */
  function draw() {
    const width = byId("chart").clientWidth;
    if (!drawn?.prediction || width < 1) return;
    const { prediction, verdicts } = drawn, known = verdicts.filter(({ verdict }) => verdict);
    const scale = chart.scaleOf(prediction, known.map(({ verdict }) => verdict.usable_bytes));
    byId("chart").replaceChildren(chart.bar(width, prediction, scale, known));
    byId("basis").textContent = known[0]?.verdict.basis ?? ""; // another card's, where it differs, beside it
    byId("verdicts").replaceChildren(...verdicts.map(({ gpu, verdict, prediction: own }) => element("li", { "data-gpu": gpu.slug },
      element("p", { class: "card" }, element("b", {}, gpu.name), ...(verdict ? [badge(verdict.verdict)] : [])),
      ...(verdict ? [chart.track(width, own, verdict, scale)] : []),
      element("p", { class: "reason" }, element("span", {}, verdict ? (verdict.basis === known[0].verdict.basis ? "" : `${verdict.basis}: `) + verdict.amounts : vramprobe.missing(drawn.cell, gpu)),
        ...(verdict ? [element("span", { class: "largest" }, "…")] : [])))));
    if (!verdicts.length) byId("verdicts").append(element("li", { class: "soft" }, "No GPU is chosen."));
  }

  const badge = (verdict) => element("span", { class: `verdict ${verdict.replaceAll(" ", "-")}` }, element("span", { "aria-hidden": "true" }, SIGNS[verdict]), ` ${verdict}`);

  /** The largest batch and length on a chosen card, each a button that takes it over. */
  function showLargest(slug, largest, take) {
    const said = [["batch_size", "largest batch "], ["seq_len", "largest length "]].flatMap(([name, label], index) => {
      const value = largest[name], button = element("button", { type: "button", class: "take", title: `Take it: ${plain(name)} ${value}` }, value ? words.count(value) : "");
      button.addEventListener("click", () => take({ [name]: value }));
      return [index ? ", " : "", ...(value ? [label, button] : [`${label}${value === null ? "none with memory to spare" : "not recorded"}`])];
    });
    byId("verdicts").querySelector(`[data-gpu="${CSS.escape(slug)}"] .largest`)?.replaceChildren(...said);
  }

  /** Another set of options: what it needs, and its verdict on the card that is aimed at. */
  function addChange({ change, needed, saved, verdict }, take) {
    const button = element("button", { type: "button", class: "take" },
      Object.entries(change).map(([name, value]) => `${form.label(name)}: ${value === true ? "on" : value === false ? "off" : value}`).join("; "));
    button.addEventListener("click", () => take(change));
    byId("changes").append(element("li", {}, button,
      element("span", { class: "number" }, bytes(needed) + (saved === undefined ? "" : `, ${bytes(Math.abs(saved))} ${saved < 0 ? "more" : "less"}`)), ...(verdict ? [badge(verdict)] : [])));
  }

  function causes(prediction) {
    const parts = chart.segments(prediction), total = parts.reduce((sum, [, size]) => sum + size, 0);
    return parts.map(([name, size]) => element("tr", {},
      element("th", { scope: "row" }, chart.swatch(name), element("span", {}, plain(name), element("small", {}, vramprobe.meanings[name] ?? ""))),
      element("td", { class: "number" }, bytes(size)), element("td", { class: "number soft" }, words.percent(size / total))));
  }

  /** On a phone, in the bar below; for a screen reader once the user pauses. */
  function speak({ prediction, verdicts, message }) {
    clearTimeout(timer);
    const known = (verdicts ?? []).filter(({ verdict }) => verdict), first = ["fits", "tight"].flatMap((said) => known.filter(({ verdict }) => verdict.verdict === said))[0];
    byId("bar-peak").textContent = prediction ? bytes(prediction.allocated.value) : "–";
    byId("bar-verdict").textContent = first ? `${first.verdict.verdict} ${first.gpu.name}` : message ? "see why" : known.length ? `does not fit the ${known.length} chosen` : "";
    const text = prediction ? [`Predicted peak ${bytes(prediction.allocated.value)}`, ...known.map(({ gpu, verdict }) => `${gpu.name}: ${verdict.verdict}`)].join(". ") : `No prediction: ${message}`;
    timer = setTimeout(() => { byId("spoken").textContent = text; }, 500);
  }

  return { show, draw, badge, showLargest, addChange };
})();
