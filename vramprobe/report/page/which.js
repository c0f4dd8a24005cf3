// Which GPU? A question about rent → answers, a table of every option, the command; worked out while nobody waits.
// In: the form's options and the question's own fields. Out: the page's elements. Never computes a figure.
"use strict";

const which = (() => {
  const { element, bytes } = words;
  const byId = (id) => document.getElementById(id);
  const root = byId("question"), table = byId("which-rows");
  const PAUSE_MS = 400; // after the last change: the calculator's own answers come first
  const SLICE_MS = 12;
  const field = (name) => byId(`q-${name}`);
  let running = 0, drawn = null;

  function build() {
    for (const term of vramprobe.terms) field("terms").append(element("option", { value: term }, term));
    const { configurations, sources, medianError } = vramprobe.speed;
    byId("which-basis").textContent = `Speed is estimated by ${configurations} published configurations of ${sources} sources, ` +
      `${words.fixed(100 * medianError, 0)}% off (median) on sources left out; intervals hold 80 %.`;
    root.addEventListener("submit", (event) => event.preventDefault());
    new ResizeObserver(() => requestAnimationFrame(draw)).observe(byId("tradeoff"));
    tables.filter("which-rows");
  }

  function read() {
    return Object.fromEntries(state.QUESTIONS.map((name) => {
      const it = field(name), text = it.value.trim();
      if (it.type === "checkbox") return [name, it.checked];
      if (it.type !== "number") return [name, it.value];
      return [name, it.validity.badInput ? NaN : text === "" ? null : Number(text)];
    }));
  }

  function write(question) {
    for (const name of state.QUESTIONS) {
      if (field(name).type === "checkbox") field(name).checked = question[name];
      else field(name).value = question[name] ?? "";
    }
  }

  /** Begins anew with each change; `take(options, slug)` takes an option's setting over into the calculator. */
  function show({ options, question }, { spec, config, message }, take) {
    running += 1;
    delete table.dataset.done;
    const asked = spec ? vramprobe.recommend(options, config, question) : { errors: [], message: message ?? "" };
    showErrors(asked.errors);
    byId("which-command").replaceChildren(...(asked.steps ? result.wrapped(vramprobe.recommendCommand(options, question)) : []));
    byId("copy-which").disabled = !asked.steps;
    if (!asked.steps) return clear(asked.errors.length ? "Mend what is marked to see what to rent." : asked.message);
    byId("which-state").textContent = "Working it out …";
    setTimeout(work, PAUSE_MS, { number: running, asked, options, take });
  }

  function showErrors(errors) {
    for (const name of state.QUESTIONS) {
      const wrong = errors.find((one) => one.option === name);
      field(name).toggleAttribute("aria-invalid", Boolean(wrong));
      field(name).closest(".field").classList.toggle("wrong", Boolean(wrong));
    }
    byId("which-problems").textContent = errors.map((one) => one.message).join("; ");
    byId("which-problems").hidden = !errors.length;
  }

  function clear(message) {
    drawn = null;
    byId("which-state").textContent = message;
    for (const place of [byId("answers"), byId("tradeoff"), table.tBodies[0]]) place.replaceChildren();
    tables.filter("which-rows");
  }

  function work(job) {
    if (job.number !== running) return;
    const until = performance.now() + SLICE_MS;
    try {
      while (performance.now() < until) {
        const step = job.asked.steps.next();
        if (step.done) return showFound(step.value, job);
        byId("which-state").textContent = `Working it out: ${step.value} of ${job.asked.total} …`;
      }
      setTimeout(work, 0, job);
    } catch (error) {
      clear(error.message);
      table.dataset.done = String(job.number);
      if (!(error instanceof vramprobe.Refusal)) throw error;
    }
  }

  function showFound(found, job) {
    drawn = found;
    const lacking = Object.entries(found.lacks).filter(([, why]) => why).map(([method, why]) => `${method}: ${why}`);
    byId("which-state").textContent = lacking.join("; ");
    byId("answers").replaceChildren(...found.answers.map((one) => answer(one, found.options)));
    table.tBodies[0].replaceChildren(...found.options.map((one) => row(one, job)));
    tables.again(table);
    tables.filter("which-rows");
    draw();
    table.dataset.done = String(job.number);
  }

  function answer({ question, option, doubt }, options) {
    const one = options[option];
    const said = one ? [element("b", {}, `${one.words.cards}, ${one.method}`), ` ${one.words.setting}: `,
      [one.words.time, one.words.cost, one.words.price].filter(Boolean).join(" · ")] : ["none"];
    return element("li", {}, element("span", { class: "soft" }, question), element("span", {}, ...said),
      ...(doubt ? [element("span", { class: "doubt" }, doubt)] : []));
  }

  function row(one, { options, take }) {
    const button = element("button", { type: "button", class: "take", title: "Show its memory in the calculator" }, one.words.cards);
    button.addEventListener("click", () => take({ ...options, ...setting(one) }, one.gpu));
    const cell = (text, sort) => element("td", { class: "number", "data-sort": sort ?? "" }, text ?? "–");
    const rest = `${one.headroom_bytes < 0 ? "−" : ""}${bytes(Math.abs(one.headroom_bytes))}`;
    return element("tr", { "data-option": `${one.num_gpus} ${one.gpu} ${one.method}`, title: one.why_not || null },
      element("th", { scope: "row" }, button), element("td", {}, one.method), element("td", {}, one.words.setting),
      cell(one.words.rate, one.tokens_per_second.value), cell(one.words.time, one.hours?.value), cell(one.words.cost, one.usd?.value),
      cell(rest, one.headroom_bytes), element("td", { "data-sort": String(["fits", "tight", "does not fit"].indexOf(one.verdict)) }, result.badge(one.verdict)),
      element("td", {}, one.words.price ?? "–"), element("td", {}, one.fits ? one.words.limits : one.words.limits.split(", ").slice(1).join(", ")));
  }

  /** What the recommendation chose, as the form has it. */
  function setting(one) {
    const { method, batch_size, grad_accum, num_gpus, sharding } = one, several = num_gpus > 1;
    return {
      method, batch_size, grad_accum: grad_accum > 1 ? grad_accum : null, gradient_checkpointing: one.gradient_checkpointing || null,
      num_gpus: several ? num_gpus : null, sharding: several ? sharding : null,
    };
  }

  function draw() {
    const place = byId("tradeoff"), width = place.clientWidth;
    if (width > 0) place.replaceChildren(...(drawn ? tradeoff.drawing(width, drawn.options) : []));
  }

  return { root, build, read, write, show };
})();
