// Options → their cost against their time, with the line of those than which none is both cheaper and faster.
// In: hours and dollars. Out: SVG. Told without colours: each method has a shape, what is tight is hollow.
"use strict";

const tradeoff = (() => {
  const { node } = chart;
  const LEFT = 58, RIGHT = 14, TOP = 12, BOTTOM = 40;
  const SHAPES = { full: "M-4-4h8v8h-8z", lora: "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z", qlora: "M0-5L5 4.5h-10z" };

  /** Those that fit than which none is as cheap and as fast, the fastest first. */
  function frontier(options) {
    const able = options.filter((one) => one.fits && one.usd).sort((one, other) => one.hours.value - other.hours.value || one.usd.value - other.usd.value);
    return able.filter((one, index) => able.slice(0, index).every((faster) => faster.usd.value > one.usd.value));
  }

  /** Elements of the plot; none where no option has a price and a time. */
  function drawing(width, options) {
    const shown = options.filter((one) => one.hours && one.usd), best = frontier(shown);
    if (!shown.length) return [];
    const height = Math.max(260, Math.min(400, width * 0.5));
    const x = scale(shown.map((one) => one.hours.value), LEFT, width - RIGHT), y = scale(shown.map((one) => one.usd.value), height - BOTTOM, TOP);
    const at = (one) => [x.at(one.hours.value), y.at(one.usd.value)];
    const svg = node("svg", { class: "tradeoff", width, height, role: "img", "aria-label": spoken(best) });
    svg.append(...axis(x, (place) => `M${place} ${TOP}V${height - BOTTOM}`, vramprobe.formatHours, 48, (place) => ({ x: place, y: height - BOTTOM + 16, "text-anchor": "middle" })));
    svg.append(...axis(y, (place) => `M${LEFT} ${place}H${width - RIGHT}`, vramprobe.formatUsd, 20, (place) => ({ x: LEFT - 8, y: place + 4, "text-anchor": "end" })));
    svg.append(node("text", { class: "label", x: width - RIGHT, y: height - 6, "text-anchor": "end" }, "time"), node("text", { class: "label", x: 0, y: TOP }, "cost"));
    if (best.length > 1) svg.append(node("path", { class: "frontier", d: best.map((one, index) => `${index ? "L" : "M"}${at(one).join(" ")}`).join("") }));
    for (const one of shown) svg.append(mark(one, at(one), best.includes(one)));
    svg.append(...names(best, at, width));
    return [svg, legend(shown)];
  }

  function mark(one, [left, top], isBest) {
    const kind = `dot ${one.fits ? "full" : "hollow"}${isBest ? " best" : ""}`;
    return node("path", { class: kind, d: SHAPES[one.method], transform: `translate(${left} ${top})` },
      node("title", {}, `${one.words.cards}, ${one.method} ${one.words.setting}: ${one.words.time}, ${one.words.cost}`));
  }

  /** Cards along the frontier, each where it touches none before. */
  function names(best, at, width) {
    const taken = [];
    return best.flatMap((one) => {
      const [left, top] = at(one), text = `${one.words.cards} ${one.method}`, size = 6.6 * text.length;
      const isEnd = left + 9 + size > width - RIGHT, start = isEnd ? left - 9 - size : left + 9;
      if (start < LEFT || taken.some((other) => Math.abs(other.top - top) < 15 && start < other.start + other.size && other.start < start + size)) return [];
      taken.push({ start, top, size });
      return [node("text", { class: "label name", x: isEnd ? left - 9 : start, y: top - 5, "text-anchor": isEnd ? "end" : "start" }, text)];
    });
  }

  function legend(shown) {
    const methods = Object.keys(SHAPES).filter((method) => shown.some((one) => one.method === method));
    const swatch = (method, kind) => node("svg", { width: 14, height: 14, "aria-hidden": "true" },
      node("path", { class: `dot ${kind}`, d: SHAPES[method], transform: "translate(7 7)" }));
    return words.element("p", { class: "legend" }, ...methods.map((method) => words.element("span", {}, swatch(method, "full"), method)),
      ...(shown.every((one) => one.fits) ? [] : [words.element("span", {}, swatch(methods[0], "hollow"), "tight")]),
      words.element("span", {}, "the line: none is both cheaper and faster"));
  }

  const spoken = (best) => `Cost against time. None is both cheaper and faster than: ${best.map((one) => `${one.words.cards} ${one.method}, ${one.words.time}, ${one.words.cost}`).join("; ")}`;

  /** Logarithms, with some room at both ends. */
  function scale(values, from, to) {
    const low = Math.log(Math.min(...values) / 1.25), high = Math.log(Math.max(...values) * 1.25);
    const at = (value) => from + ((Math.log(value) - low) / (high - low)) * (to - from);
    const ticks = [];
    for (let power = Math.floor(low / Math.LN10) - 1; power <= high / Math.LN10; power += 1) {
      for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
    }
    return { at, ticks: ticks.filter((value) => Math.log(value) >= low && Math.log(value) <= high) };
  }

  function axis({ at, ticks }, line, inWords, least, place) {
    let last = -Infinity;
    return ticks.flatMap((value) => {
      const where = at(value), isFar = Math.abs(where - last) >= least;
      if (isFar) last = where;
      return [node("path", { class: "grid", d: line(where) }), ...(isFar ? [node("text", { class: "tick", ...place(where) }, inWords(value))] : [])];
    });
  }

  return { drawing, frontier };
})();
