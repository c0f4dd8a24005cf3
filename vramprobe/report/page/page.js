// The page's one cycle: hash → state → form → engine → result, and back to the hash at each change.
"use strict";

(() => {
  const byId = (id) => document.getElementById(id);
  let now = null;

  function start() {
    chart.patterns();
    form.build();
    cards.build();
    changes.build();
    which.build();
    replay.build(byId("gpus-rows"));
    tables.start();
    load();
    for (const root of [form.root, which.root]) {
      root.addEventListener("input", changed);
      root.addEventListener("change", changed);
    }
    form.root.addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("hashchange", load);
    document.addEventListener("click", jump);
    byId("reset").addEventListener("click", () => adopt(state.start()));
    byId("copy-link").addEventListener("click", copyLink);
    byId("copy-command").addEventListener("click", (event) => copy(byId("command").textContent, event.target));
    byId("copy-which").addEventListener("click", (event) => copy(byId("which-command").textContent, event.target));
    new ResizeObserver(() => requestAnimationFrame(redraw)).observe(byId("chart"));
    document.documentElement.dataset.ready = "true";
  }

  /** A link's state; a hash without `=` is a place in the page, not a state. */
  function load() {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) {
      if (!now) adopt(state.start());
      return;
    }
    if (now && hash === state.encode(now).hash) return;
    const { state: found, problems } = state.decode(hash);
    byId("link-problems").textContent = problems.join("; ");
    byId("link-problems").hidden = !problems.length;
    adopt(found);
  }

  function adopt(found) {
    form.write(found);
    which.write(found.question);
    changed();
  }

  function changed() {
    const next = { ...form.read(), question: which.read() };
    if (now && JSON.stringify(next) === JSON.stringify(now)) return;
    now = next;
    remember();
    render();
  }

  function remember() {
    const { hash, isWhole } = state.encode(now);
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    byId("link-hint").textContent = isWhole ? "" :
      "This config.json is too large for a link: who opens the link must paste it.";
  }

  function render() {
    const answer = ask(now);
    form.follow(now, answer.spec);
    form.showErrors(answer.errors);
    result.show(answer);
    cards.show(answer, now.cards, giveLargest);
    changes.show(answer, now.options, takeAll);
    which.show(now, answer, takeSetting);
    awaitReplay(answer);
  }

  /** The arithmetic's answer stands until the replay's comes: without a card, on the chosen ones, then on all others. */
  function awaitReplay(answer) {
    const chosen = (answer.verdicts ?? []).map(({ gpu }) => gpu);
    const others = vramprobe.gpus.filter((gpu) => gpu.memory_bytes && !chosen.includes(gpu));
    const asked = replay.show(answer, now.options, chosen, others, ({ stage, slug, prediction, verdict, largest }, left) => {
      if (slug === null && prediction) answer = { ...answer, prediction };
      if (verdict) {
        cards.judge(slug, verdict);
        answer = { ...answer, verdicts: answer.verdicts.map((one) => (one.gpu.slug === slug ? { ...one, verdict } : one)) };
      }
      if (stage === "shown") {
        result.show(answer);
        result.await(left.shown);
        redraw();
      }
      if (largest) cards.count(slug, largest);
      told(left);
    });
    result.await(asked.shown);
    told(asked);
  }

  /** What of the table of all cards stays as it is. */
  function told(left) {
    if (!left.shown && !left.others) cards.end("judged");
    if (!left.largest && !left.othersLargest) cards.end("counted");
  }

  const found = new Map(); // slug → largest counts of the cell on show, for when it is drawn again
  function giveLargest(slug, largest) {
    found.set(slug, largest);
    result.showLargest(slug, largest, take);
  }

  function redraw() {
    result.draw();
    for (const [slug, largest] of found) result.showLargest(slug, largest, take);
  }

  function take(option, value) {
    adopt({ ...now, options: { ...now.options, [option]: value } });
    byId(option).focus();
  }

  function takeAll(options, first) {
    adopt({ ...now, options });
    (byId(`${first}-${options[first]}`) ?? byId(first)).focus();
  }

  /** An option's setting, on its card beside those that are compared. */
  function takeSetting(options, slug) {
    adopt({ ...now, options, cards: now.cards.includes(slug) ? now.cards : [...now.cards, slug] });
    byId("result").scrollIntoView({ block: "start" });
    byId("result").focus({ preventScroll: true });
  }

  /** What the engine answers: {errors, spec, config, base, prediction, verdicts}, or a message in place of a prediction. */
  function ask({ options, cards: chosen, configText }) {
    found.clear();
    const { config, problem } = configOf(options.model, configText);
    if (problem) return { errors: [{ option: "config", message: problem }], message: problem };
    let spec = null, errors = [];
    try {
      ({ spec, errors } = vramprobe.resolve(options, config));
      if (errors.length) return { errors, message: "Mend what the form marks to see a prediction." };
      const shown = vramprobe.gpus.filter((gpu) => gpu.memory_bytes && chosen.includes(gpu.slug))
        .sort((one, other) => one.memory_bytes - other.memory_bytes);
      const base = shown.find((gpu) => vramprobe.hasFit(spec, gpu));
      const prediction = vramprobe.predict(spec, config, base);
      const verdicts = shown.map((gpu) => ({ gpu, verdict: vramprobe.verdict(prediction, gpu) }));
      return { errors, spec, config, base, prediction, verdicts };
    } catch (error) {
      return { errors: [{ option: blamed(error.message, options), message: error.message }], spec, config, message: error.message };
    }
  }

  /** The option that the arithmetic's refusal begins with, or names, or what was pasted, or the model. */
  function blamed(message, options) {
    const names = Object.keys(options).filter((name) => name !== "model");
    const named = names.find((name) => message.startsWith(name)) ?? names.find((name) => message.split(" ").includes(name));
    return named ?? (options.model === state.PASTED ? "config" : "model");
  }

  function configOf(model, text) {
    if (model !== state.PASTED) return { config: vramprobe.catalog.find((entry) => entry.slug === model).config };
    if (!text.trim()) return { problem: "Paste the model's config.json to see a prediction." };
    let config;
    try {
      config = JSON.parse(text);
    } catch (error) {
      return { problem: `This is not valid JSON: ${error.message}` };
    }
    const isObject = config !== null && typeof config === "object" && !Array.isArray(config);
    return isObject ? { config } : { problem: "This is JSON, but no config.json: that is an object, in braces." };
  }

  /** Links within the page scroll there, and leave the hash to the state. */
  function jump(event) {
    const link = event.target.closest?.('a[href^="#"]');
    if (!link) return;
    const target = document.getElementById(link.getAttribute("href").slice(1));
    if (!target) return;
    event.preventDefault();
    target.scrollIntoView({ block: "start" });
    if (!target.hasAttribute("tabindex")) target.setAttribute("tabindex", "-1");
    target.focus({ preventScroll: true });
  }

  function copyLink(event) {
    copy(location.href, event.target);
  }

  /** Through a selection where the browser gives pages from a file no clipboard. */
  async function copy(text, button) {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = words.element("textarea", { class: "unseen" });
      area.value = text;
      document.body.append(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
      button.focus();
    }
    const before = button.dataset.label ?? button.textContent;
    button.dataset.label = before;
    button.textContent = done ? "Copied" : "Copy it by hand";
    setTimeout(() => { button.textContent = before; }, 1500);
  }

  try {
    start();
  } catch (error) {
    byId("link-problems").textContent = `The calculator did not start (${error.message}); the tables below need no script.`;
    byId("link-problems").hidden = false;
    throw error;
  }
})();
