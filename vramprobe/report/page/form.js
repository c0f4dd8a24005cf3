// The form ⇄ a state, errors beside their option, and what a default comes to. Never predicts.
"use strict";

const form = (() => {
  const { element, plain } = words;
  const root = document.getElementById("form");
  const byId = (id) => document.getElementById(id);
  const SELECTS = state.NAMES.filter((name) => state.isA(name, "choice"));
  const INPUTS = state.NAMES.filter((name) => state.isA(name, "number") || state.isA(name, "text"));
  const FLAGS = state.NAMES.filter((name) => state.isA(name, "flag"));
  const MORE = state.NAMES.filter((name) => state.OPTIONS[name].more);

  /** Fill lists once, from the engine's own. */
  function build() {
    buildModels();
    for (const method of vramprobe.choices.method) {
      const id = `method-${method}`;
      byId("method").append(
        element("input", { type: "radio", name: "method", id, value: method }), element("label", { for: id }, method));
    }
    for (const name of SELECTS) {
      byId(name).append(element("option", { value: "" }, "default"));
      for (const value of vramprobe.choices[name] ?? []) byId(name).append(element("option", { value }, value));
    }
    for (const value of vramprobe.choices.lora_targets ?? ["all-linear", "q_v"]) {
      byId("targets").append(element("option", { value }));
    }
    for (const gpu of vramprobe.gpus) {
      const id = `card-${gpu.slug}`;
      const size = gpu.memory_bytes ? `${words.gib(gpu.memory_bytes)} GiB` : "memory not known";
      byId("cards").append(element("label", { for: id },
        element("input", { type: "checkbox", id, value: gpu.slug, disabled: !gpu.memory_bytes }),
        element("span", {}, gpu.name), element("span", { class: "soft" }, size)));
    }
    for (const name of FLAGS) byId(MORE.includes(name) ? "more-flags" : "flags").append(checkbox(name));
    for (const field of root.querySelectorAll("[data-option]")) {
      const name = field.dataset.option;
      field.append(element("p", { class: "error", id: `${name}-error`, hidden: true }));
    }
  }

  function checkbox(name) {
    const { label, methods } = state.OPTIONS[name];
    return element("div", { class: "field check", "data-option": name, "data-methods": methods },
      element("input", { id: name, type: "checkbox" }), element("label", { for: name }, label));
  }

  /** By family, in the catalog's order, and the config of one's own last. */
  function buildModels() {
    const families = new Map();
    for (const entry of vramprobe.catalog) {
      const family = entry.config.model_type ?? "";
      if (!families.has(family)) families.set(family, element("optgroup", { label: family }));
      const size = words.params(entry.num_params);
      families.get(family).append(
        element("option", { value: entry.slug }, size ? `${entry.slug} (${size})` : entry.slug));
    }
    byId("model").append(...families.values(), element("optgroup", { label: "another model" },
      element("option", { value: state.PASTED }, "paste a config.json …")));
  }

  /** Show a state; text that is being typed is left alone. */
  function write(now) {
    byId("model").value = now.options.model;
    byId("config").value = now.configText;
    for (const radio of root.elements.method) radio.checked = radio.value === now.options.method;
    for (const name of FLAGS) byId(name).checked = now.options[name] === true;
    for (const name of SELECTS) choose(byId(name), now.options[name]);
    for (const name of INPUTS) byId(name).value = now.options[name] ?? "";
    for (const box of root.querySelectorAll("#cards input")) box.checked = now.cards.includes(box.value);
    if (MORE.some((name) => now.options[name] !== null)) byId("more").open = true;
  }

  /** A value that no choice has (from a link) is shown all the same: the engine says what is wrong with it. */
  function choose(select, value) {
    if (value !== null && ![...select.options].some((option) => option.value === value)) {
      select.append(element("option", { value }, value));
    }
    select.value = value ?? "";
  }

  /** The state that the form shows. Options that the method, or a single GPU, has no use for are left out. */
  function read() {
    const options = { ...state.start().options, model: byId("model").value, method: root.elements.method.value || null };
    for (const name of FLAGS) options[name] = byId(name).checked || null;
    for (const name of [...SELECTS, ...INPUTS]) options[name] = typed(name);
    for (const field of root.querySelectorAll("[data-option]")) {
      if (!isFor(field, options)) options[field.dataset.option] = null;
    }
    const cards = [...root.querySelectorAll("#cards input:checked")].map((box) => box.value);
    return { options, cards, configText: byId("config").value };
  }

  /** null: left out. Text that is no number stays text, for the engine to complain about. */
  function typed(name) {
    const field = byId(name), text = field.value.trim();
    if (field.validity.badInput) return "no number";
    if (text === "") return null;
    return state.isA(name, "number") ? Number(text) : text;
  }

  function isFor(field, options) {
    for (let at = field; at && at !== root; at = at.parentElement) {
      if (at.dataset.methods && !at.dataset.methods.split(" ").includes(options.method)) return false;
      if ("several" in at.dataset && !(options.num_gpus > 1)) return false;
      if ("shared" in at.dataset && !(options.cp_size > 1)) return false;
      if ("hybrid" in at.dataset && !vramprobe.hybrid.includes(options.sharding)) return false;
    }
    return true;
  }

  /** Hide what the method, or a single GPU, has no use for, and say what each default comes to in this cell. */
  function follow(now, spec) {
    for (const field of root.querySelectorAll("[data-methods], [data-several], [data-shared], [data-hybrid]")) field.hidden = !isFor(field, now.options);
    byId("batch-label").textContent = now.options.num_gpus > 1 && !vramprobe.oneBatch.includes(now.options.sharding) ? "Batch per GPU" : "Batch";
    root.querySelector('[data-option="config"]').hidden = now.options.model !== state.PASTED;
    for (const name of SELECTS) {
      byId(name).options[0].textContent = spec?.[name] && now.options[name] === null ? `${spec[name]} (default)` : byId(name).dataset.none ?? "default";
    }
    for (const name of INPUTS) byId(name).placeholder = spec?.[name] ?? byId(name).dataset.none ?? "";
    byId("cards-count").textContent = now.cards.length ? `${now.cards.length} chosen` : "none chosen";
    byId("model-hint").textContent = modelHint(now);
  }

  function modelHint(now) {
    const entry = vramprobe.catalog.find((one) => one.slug === now.options.model);
    if (!entry) return "";
    const parts = [entry.name === entry.slug ? "" : entry.name];
    parts.push(entry.num_params ? `${words.count(entry.num_params)} parameters` : "");
    return parts.filter(Boolean).join(", ");
  }

  /** Each error at its option; one of no option that is shown goes below the form. */
  function showErrors(errors) {
    const elsewhere = [];
    const byOption = new Map();
    for (const { option, message } of errors) byOption.set(option, [...(byOption.get(option) ?? []), message]);
    for (const field of root.querySelectorAll("[data-option]")) {
      const name = field.dataset.option, place = byId(`${name}-error`), control = byId(name);
      const said = field.hidden || field.closest("[hidden]") ? [] : byOption.get(name) ?? [];
      place.textContent = said.join("; ");
      place.hidden = !said.length;
      field.classList.toggle("wrong", said.length > 0);
      if (said.length) {
        byOption.delete(name);
        control.setAttribute("aria-invalid", "true");
        control.setAttribute("aria-describedby", place.id);
        if (MORE.includes(name)) byId("more").open = true;
      } else {
        control.removeAttribute("aria-invalid");
        control.removeAttribute("aria-describedby");
      }
    }
    for (const [option, messages] of byOption) elsewhere.push(...messages.map((text) => `${plain(option ?? "")}: ${text}`));
    byId("form-problems").textContent = elsewhere.join("; ").replace(/^: /, "");
    byId("form-problems").hidden = !elsewhere.length;
  }

  return { root, build, write, read, follow, showErrors };
})();
