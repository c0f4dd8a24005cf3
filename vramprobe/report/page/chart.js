// A prediction and cards → the stacked bar of the terms with its interval, and a track per card on the same scale.
// In: bytes. Out: SVG. Told without colours: each cause has a hatch of its own, and is named in the table below.
"use strict";

const chart = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const PAD = 2, BAR_TOP = 40, BAR = 44, AXIS = 24;
  const MIN_LABELLED = 5; // pixels: what is thinner is named in the table alone
  /** Hatch of each cause in a tile of 8 × 8; no hatch is a plain area. */
  const HATCHES = {
    gradients: "M0 0 8 8M0 8 8 0", optimizer_state: "M-2 2 2 -2M0 8 8 0M6 10 10 6", checkpoint_store: "M4 0V8",
    saved_activations: "M0 4H8", recomputed_layer: "M0 2H8M0 6H8", cast_copies: "M3 4h2", dequantisation: "M2 0V8M6 0V8",
    temporaries: "M1 2h2M5 6h2", optimizer_temporaries: "M-2 6 2 10M0 0 8 8M6 -2 10 2", allocator: "M0 8 8 0",
    context: "M0 0 8 8", constant: "M1 1h1M5 5h1", gathered_weights: "M0 4H8M4 0V8", gradient_buckets: "M0 2H8M2 0V8",
  };
  const KNOWN = ["weights", "gradients", "optimizer_state", "batch", "saved_activations", "checkpoint_store",
    "recomputed_layer", "logits", "cast_copies", "dequantisation", "temporaries", "optimizer_temporaries", "gathered_weights",
    "gradient_buckets", "allocator", "context", "constant"];

  function node(tag, attributes, ...children) {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }

  const kind = (name) => (KNOWN.includes(name) ? name : "constant");

  /** The fill of a cause: its colour with its hatch over it. Once per document. */
  function patterns() {
    const made = KNOWN.map((name) => node("pattern",
      { id: `fill-${name}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      node("rect", { width: 8, height: 8, class: `fill ${name}` }),
      ...(HATCHES[name] ? [node("path", { d: HATCHES[name], class: "hatch" })] : [])));
    const svg = node("svg", { width: 0, height: 0, "aria-hidden": "true", class: "defs" }, node("defs", {}, ...made));
    document.body.append(svg);
  }

  function swatch(name) {
    return node("svg", { class: "swatch", "aria-hidden": "true", width: 18, height: 18 },
      node("rect", { width: 18, height: 18, rx: 3, fill: `url(#fill-${kind(name)})` }));
  }

  /** Terms and what stands beside them, then what allocator and context add where a fit knows them: held against a card. */
  function segments(prediction) {
    const allocated = prediction.peak_allocated_bytes.value;
    const found = prediction.terms.filter(([, size]) => size > 0);
    const rest = allocated - found.reduce((sum, [, size]) => sum + size, 0);
    if (rest > 0) found.push(["constant", rest]);
    const reserved = prediction.reserved_bytes?.value, device = prediction.device_bytes?.value;
    if (reserved > allocated) found.push(["allocator", reserved - allocated]);
    if (device > (reserved ?? allocated)) found.push(["context", device - (reserved ?? allocated)]);
    return found;
  }

  const needed = (prediction) =>
    prediction.device_bytes ?? prediction.reserved_bytes ?? prediction.peak_allocated_bytes;

  /** The end of the scale: the interval with the smallest chosen card that holds it; larger cards run off it. */
  function scaleOf(prediction, usable) {
    const high = needed(prediction).high;
    const holding = usable.filter((one) => one >= high);
    const end = Math.max(high, ...usable.filter((one) => one < high), holding.length ? Math.min(...holding) : 0);
    return 1.04 * (end > 4 * high ? 1.3 * high : end);
  }

  /** Four to eight round amounts from 0 on. */
  function ticks(scale) {
    const unit = scale >= words.GIB ? words.GIB : words.GIB / 1024;
    let step = unit / 1024;
    for (let power = -3; power < 9; power += 1) {
      for (const factor of [1, 2, 5]) {
        step = unit * factor * 10 ** power;
        if (scale / step < 8) return { unit, steps: Array.from({ length: Math.floor(scale / step) + 1 }, (_, i) => i * step) };
      }
    }
    return { unit, steps: [0] };
  }

  /** The bar itself in an svg as wide as its place. */
  function bar(width, prediction, scale, verdicts) {
    const x = (size) => PAD + (width - 2 * PAD) * Math.min(size / scale, 1);
    const need = needed(prediction), parts = segments(prediction);
    const svg = node("svg", { class: "stack", width, height: BAR_TOP + BAR + AXIS, role: "img", "aria-label": spoken(prediction, parts) });
    svg.append(...axis(width, scale, x));
    let at = 0;
    const spots = [];
    for (const [name, size] of parts) {
      const left = x(at), right = x(at + size);
      svg.append(node("rect", { x: left, y: BAR_TOP, width: Math.max(right - left, 0.75), height: BAR, fill: `url(#fill-${kind(name)})`, class: "part" },
        node("title", {}, `${words.plain(name)}: ${words.bytes(size)}`)));
      if (at > 0) svg.append(node("path", { class: "seam", d: `M${left} ${BAR_TOP}v${BAR}` }));
      spots.push({ name, size, left, right });
      at += size;
    }
    svg.append(...limits(x, scale, verdicts), ...labels(spots, width, names(verdicts, scale, x)), ...whisker(x, need));
    return svg;
  }

  function spoken(prediction, parts) {
    const terms = parts.map(([name, size]) => `${words.plain(name)} ${words.bytes(size)}`).join(", ");
    const need = needed(prediction);
    return `Stacked bar: ${terms}; from ${words.bytes(need.low)} to ${words.bytes(need.high)}`;
  }

  /** Lines at round amounts, and the amounts where they do not touch, the last one with the unit. */
  function axis(width, scale, x) {
    const { unit, steps } = ticks(scale), y = BAR_TOP + BAR;
    const name = unit === words.GIB ? "GiB" : "MiB";
    let free = width;
    const texts = [...steps].reverse().flatMap((step, index) => {
      const text = `${Number((step / unit).toPrecision(6))}${index ? "" : ` ${name}`}`;
      const half = 3.6 * text.length, middle = Math.max(Math.min(x(step), width - half), half);
      if (middle + half > free) return [];
      free = middle - half - 8;
      return [node("text", { x: middle, y: y + 18, class: "tick", "text-anchor": "middle" }, text)];
    });
    return [...steps.map((step) => node("path", { class: "grid", d: `M${x(step)} ${BAR_TOP - 6}V${y + 5}` })), ...texts];
  }

  /** Where the chosen cards end, as far as the scale goes. */
  function limits(x, scale, verdicts) {
    const ends = new Set(verdicts.map(({ verdict }) => verdict.usable_bytes).filter((usable) => usable <= scale));
    return [...ends].flatMap((usable) => ["halo", "limit"].map((name) =>
      node("path", { class: name, d: `M${x(usable)} ${BAR_TOP - 6}v${BAR + 12}` })));
  }

  /** The cards' names beside their ends, to the left of them: {text, left, right}, those that do not overlap. */
  function names(verdicts, scale, x) {
    let free = -Infinity;
    return verdicts.filter(({ verdict }) => verdict.usable_bytes <= scale).flatMap(({ gpu, verdict }) => {
      const right = x(verdict.usable_bytes), left = right - widthOf(gpu.name);
      if (left < free) return [];
      free = right;
      return [{ text: gpu.name, left, right }];
    });
  }

  const widthOf = (text) => 6.6 * text.length + 10;

  /** Names of the parts over their left edge, the largest first, then the cards' where there is room. */
  function labels(spots, width, cards) {
    const taken = [];
    const isFree = (left, right) => left >= 0 && right <= width + 8 && taken.every((one) => right <= one.left || left >= one.right);
    const made = [];
    for (const { name, size, left, right: end } of [...spots].sort((a, b) => b.size - a.size)) {
      if (end - left < MIN_LABELLED) continue;
      const text = words.plain(name), amount = words.bytes(size);
      const right = left + Math.max(widthOf(text), widthOf(amount));
      if (!isFree(left, right)) continue;
      taken.push({ left, right });
      made.push(
        node("path", { class: "leader", d: `M${left + 0.5} ${BAR_TOP - 33}V${BAR_TOP}` }),
        node("text", { x: left + 5, y: BAR_TOP - 24, class: "label name" }, text),
        node("text", { x: left + 5, y: BAR_TOP - 9, class: "label" }, amount));
    }
    for (const { text, left, right } of cards) {
      if (!isFree(left, right)) continue;
      taken.push({ left, right });
      made.push(node("text", { x: right, y: BAR_TOP - 12, class: "label", "text-anchor": "end" }, text));
    }
    return made;
  }

  /** Where the truth should lie: a whisker through the middle of the bar, in paper and ink to show on any colour. */
  function whisker(x, { value, low, high }) {
    const y = BAR_TOP + BAR / 2;
    const path = `M${x(low)} ${y - 9}v18M${x(low)} ${y}H${x(high)}M${x(high)} ${y - 9}v18`;
    return [
      node("path", { class: "halo", d: path }), node("path", { class: "whisker", d: path }),
      node("path", { class: "value", d: `M${x(value)} ${BAR_TOP - 3}v${BAR + 6}` }),
    ];
  }

  /** One card on the bar's scale: its usable memory as a track, with the interval over it. */
  function track(width, prediction, verdict, scale) {
    const x = (size) => PAD + (width - 2 * PAD) * Math.min(size / scale, 1);
    const need = needed(prediction), end = x(verdict.usable_bytes), isBeyond = verdict.usable_bytes > scale;
    const stretch = (name, from, to) => node("rect", { x: from, y: 4, width: Math.max(to - from, 0), height: 6, class: name });
    const svg = node("svg", { class: "track", width, height: 14, "aria-hidden": "true" });
    svg.append(
      stretch("usable", PAD, end), stretch("used", PAD, Math.min(x(need.value), end)), stretch("over", end, x(need.value)),
      stretch("span", x(need.low), x(need.high)), node("path", { class: "value", d: `M${x(need.value)} 3v8` }),
      node("path", isBeyond ? { class: "beyond", d: `M${width - 7} 3l4 4l-4 4` } : { class: "limit", d: `M${end} 0v14` }));
    return svg;
  }

  return { node, patterns, swatch, segments, needed, scaleOf, bar, track };
})();
