// The form ⇄ a state: the list of models with its search, the options that the book's recipes differ in, the cards.
const form = (() => {
  const { element, plain } = words;
  const root = byId("form");
  const LABELS = { method: "Method", gradient_checkpointing: "Gradient checkpointing" }, NUMBERS = { batch_size: "Batch", seq_len: "Length" };
  const isFlag = (name) => vramprobe.axes[name].every((value) => typeof value === "boolean");

  /** Fill lists once. */
  function build() {
    const recorded = vramprobe.models(), first = (one) => Number(!recorded.has(one.slug));
    for (const { slug, num_params: number } of [...vramprobe.catalog].sort((one, other) => first(one) - first(other))) {
      const text = [slug, words.params(number)].filter(Boolean).join(" · ");
      byId("model").append(element("option", { value: slug, class: recorded.has(slug) ? null : "soft" }, recorded.has(slug) ? text : `${text} · not recorded`));
    }
    for (const name of Object.keys(vramprobe.axes)) byId("options").append(isFlag(name) ? checkbox(name) : choice(name));
    for (const { slug, name, memory_bytes: size } of vramprobe.gpus) {
      byId("cards").append(element("label", {}, element("input", { type: "checkbox", value: slug, id: `card-${slug}`, disabled: !size }),
        element("span", {}, name), element("span", { class: "soft" }, size ? `${words.gib(size)} GiB` : "memory not known")));
    }
    byId("search").addEventListener("input", search);
  }

  const label = (name) => LABELS[name] ?? plain(name);
  const checkbox = (name) => element("div", { class: "field check" }, element("input", { id: name, type: "checkbox" }), element("label", { for: name }, label(name)));
  function choice(name) {
    const radios = vramprobe.axes[name].flatMap((value) => [element("input", { type: "radio", name, id: `${name}-${value}`, value }), element("label", { for: `${name}-${value}` }, String(value))]);
    return element("fieldset", { class: "field segments" }, element("legend", {}, label(name)), element("div", {}, ...radios));
  }

  /** Show the models that have every word, and choose the first if the chosen one is not among them. */
  function search() {
    const wanted = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = [...byId("model").options].filter((option) => {
      const { slug, name, family } = vramprobe.catalog.find((one) => one.slug === option.value);
      option.hidden = option.disabled = !wanted.every((word) => `${slug} ${name} ${family}`.toLowerCase().includes(word));
      return !option.hidden;
    });
    byId("found").textContent = `${shown.length} of ${vramprobe.catalog.length} models`;
    if (shown.length && !shown.includes(byId("model").selectedOptions[0])) byId("model").value = shown[0].value;
  }

  function write({ cell, cards }) {
    byId("search").value = "";
    search();
    byId("model").value = cell.model;
    for (const name of Object.keys(NUMBERS)) byId(name).value = cell[name];
    for (const name of Object.keys(vramprobe.axes)) {
      if (isFlag(name)) byId(name).checked = cell[name];
      else byId(`${name}-${cell[name]}`).checked = true;
    }
    for (const box of root.querySelectorAll("#cards input")) box.checked = cards.includes(box.value);
  }

  /** The state that the form shows; a count that is none stays what it is, for `problem` to complain about. */
  function read() {
    const cell = { model: byId("model").value };
    for (const name of Object.keys(vramprobe.axes)) {
      cell[name] = isFlag(name) ? byId(name).checked : vramprobe.axes[name].find((value) => String(value) === root.elements[name].value);
    }
    for (const name of Object.keys(NUMBERS)) cell[name] = byId(name).value.trim() === "" ? null : Number(byId(name).value);
    return { cell, cards: [...root.querySelectorAll("#cards input:checked")].map((box) => box.value) };
  }

  /** Mark what is wrong with the counts, and return it in words; empty where nothing is. */
  function follow({ cell, cards }) {
    const wrong = Object.keys(NUMBERS).filter((name) => !state.isCount(cell[name]));
    for (const name of Object.keys(NUMBERS)) byId(name).toggleAttribute("aria-invalid", wrong.includes(name));
    const entry = vramprobe.catalog.find(({ slug }) => slug === cell.model);
    byId("model-hint").textContent = [entry.name, entry.num_params && `${words.count(entry.num_params)} parameters`].filter(Boolean).join(", ");
    byId("cards-count").textContent = cards.length ? `${cards.length} chosen` : "none chosen";
    byId("form-problems").textContent = wrong.map((name) => `${NUMBERS[name]}: ${cell[name] ?? "nothing"} given; must be a whole number of 1 or more`).join("; ");
    byId("form-problems").hidden = !wrong.length;
    return byId("form-problems").textContent;
  }

  return { root, label, build, write, read, follow };
})();
