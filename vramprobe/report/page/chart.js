// A prediction and cards → the stacked bar of the causes with its interval, and a track per card on the same scale.
// In: bytes. Out: SVG. Told without colours: each cause has a hatch of its own, and is named in the table below.
const chart = (() => {
  const PAD = 2, TOP = 40, BAR = 44, AXIS = 24, LEAST_LABELLED = 5; // pixels: what is thinner is named in the table alone
  /** Hatch of each cause in a tile of 8 × 8; an empty one is a plain area. */
  const HATCHES = {
    weights: "", gradients: "M0 0 8 8M0 8 8 0", optimizer_state: "M-2 2 2 -2M0 8 8 0M6 10 10 6", batch: "", saved_activations: "M0 4H8",
    temporaries: "M1 2h2M5 6h2", other: "M1 1h1M5 5h1", checkpoint_store: "M0 2H8M0 6H8", logits: "M0 0 8 8", cast_copies: "M2 0V8M6 0V8",
    recomputed_layer: "M0 3H8M0 4H8", optimizer_temporaries: "M3 4h2", workspaces: "M4 0V8", block_remainders: "M0 2H8M2 0V8", allocator: "M0 8 8 0",
  };
  function node(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  /** The fill of a cause: its colour with its hatch over it. Once per document. */
  function patterns() {
    const made = Object.entries(HATCHES).map(([name, d]) => node("pattern", { id: `fill-${name}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      node("rect", { width: 8, height: 8, class: `fill ${name}` }), node("path", { d, class: "hatch" })));
    document.body.append(node("svg", { width: 0, height: 0, "aria-hidden": "true", class: "defs" }, node("defs", {}, ...made)));
  }

  const swatch = (name) => node("svg", { class: "swatch", "aria-hidden": "true", width: 18, height: 18 },
    node("rect", { width: 18, height: 18, rx: 3, fill: `url(#fill-${name})` }));

  /** Causes, then what the allocator holds beside them. */
  function segments({ terms, allocated, reserved }) {
    const held = reserved.value - allocated.value;
    return [...terms(), ...(held > 0 ? [["allocator", held]] : [])];
  }

  /** The end of the scale: the interval with the smallest chosen card that holds it; larger cards run off it. */
  function scaleOf({ reserved: { high } }, usable) {
    const holding = usable.filter((one) => one >= high);
    const end = Math.max(high, ...usable.filter((one) => one < high), holding.length ? Math.min(...holding) : 0);
    return 1.04 * (end > 4 * high ? 1.3 * high : end);
  }

  const across = (width, scale) => (size) => PAD + (width - 2 * PAD) * Math.min(size / scale, 1);

  function bar(width, prediction, scale, verdicts) {
    const x = across(width, scale), parts = segments(prediction), { low, value, high } = prediction.reserved, middle = TOP + BAR / 2;
    const spoken = parts.map(([name, size]) => `${words.plain(name)} ${words.bytes(size)}`).join(", ");
    const svg = node("svg", { class: "stack", width, height: TOP + BAR + AXIS, role: "img",
      "aria-label": `Stacked bar: ${spoken}; from ${words.bytes(low)} to ${words.bytes(high)}` });
    svg.append(...axis(width, scale, x));
    let at = 0;
    const spots = parts.map(([name, size]) => {
      const left = x(at), right = x(at += size);
      svg.append(node("rect", { x: left, y: TOP, width: Math.max(right - left, 0.75), height: BAR, fill: `url(#fill-${name})`, class: "part" },
        node("title", {}, `${words.plain(name)}: ${words.bytes(size)}`)), node("path", { class: "seam", d: `M${left} ${TOP}v${BAR}` }));
      return { name, size, left, right };
    });
    for (const end of new Set(verdicts.map(({ verdict }) => verdict.usable_bytes).filter((usable) => usable <= scale))) {
      for (const name of ["halo", "limit"]) svg.append(node("path", { class: name, d: `M${x(end)} ${TOP - 6}v${BAR + 12}` }));
    }
    const whisker = `M${x(low)} ${middle - 9}v18M${x(low)} ${middle}H${x(high)}M${x(high)} ${middle - 9}v18`;
    svg.append(...labels(spots, width), node("path", { class: "halo", d: whisker }), node("path", { class: "whisker", d: whisker }),
      node("path", { class: "value", d: `M${x(value)} ${TOP - 3}v${BAR + 6}` }));
    return svg;
  }

  /** Lines at four to eight round amounts, and the amounts where they do not touch, the last one with the unit. */
  function axis(width, scale, x) {
    const unit = scale >= words.GIB ? words.GIB : words.GIB / 1024, round = [1, 2, 5].flatMap((one) => [...Array(12).keys()].map((power) => one * 10 ** (power - 3)));
    const step = unit * round.sort((one, other) => one - other).find((one) => scale / (one * unit) < 8);
    const steps = Array.from({ length: Math.floor(scale / step) + 1 }, (_, index) => index * step);
    let free = width;
    const texts = [...steps].reverse().flatMap((amount, index) => {
      const text = `${Number((amount / unit).toPrecision(6))}${index ? "" : unit === words.GIB ? " GiB" : " MiB"}`;
      const half = 3.6 * text.length, middle = Math.max(Math.min(x(amount), width - half), half);
      if (middle + half > free) return [];
      free = middle - half - 8;
      return [node("text", { x: middle, y: TOP + BAR + 18, class: "tick", "text-anchor": "middle" }, text)];
    });
    return [...steps.map((amount) => node("path", { class: "grid", d: `M${x(amount)} ${TOP - 6}V${TOP + BAR + 5}` })), ...texts];
  }

  /** Names of the parts over their left edge, the largest first, where they do not overlap. */
  function labels(spots, width) {
    const taken = [];
    return [...spots].sort((one, other) => other.size - one.size).flatMap(({ name, size, left, right: end }) => {
      const texts = [words.plain(name), words.bytes(size)], right = left + 6.6 * Math.max(...texts.map((text) => text.length)) + 10;
      if (end - left < LEAST_LABELLED || right > width + 8 || taken.some((one) => right > one.left && left < one.right)) return [];
      taken.push({ left, right });
      return [node("path", { class: "leader", d: `M${left + 0.5} ${TOP - 33}V${TOP}` }), node("text", { x: left + 5, y: TOP - 24, class: "label name" }, texts[0]),
        node("text", { x: left + 5, y: TOP - 9, class: "label" }, texts[1])];
    });
  }

  /** One card on the bar's scale: its usable memory as a track, with the interval over it. */
  function track(width, { reserved: need }, { usable_bytes: usable }, scale) {
    const x = across(width, scale), end = x(usable);
    const stretch = (name, from, to) => node("rect", { x: from, y: 4, width: Math.max(to - from, 0), height: 6, class: name });
    return node("svg", { class: "track", width, height: 14, "aria-hidden": "true" },
      stretch("usable", PAD, end), stretch("used", PAD, Math.min(x(need.value), end)), stretch("over", end, x(need.value)),
      stretch("span", x(need.low), x(need.high)), node("path", { class: "value", d: `M${x(need.value)} 3v8` }),
      node("path", usable > scale ? { class: "beyond", d: `M${width - 7} 3l4 4l-4 4` } : { class: "limit", d: `M${end} 0v14` }));
  }

  return { patterns, swatch, segments, scaleOf, bar, track };
})();
