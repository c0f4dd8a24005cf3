// Amounts and names in words, as units.py and display.py write them. Never computes memory.
"use strict";

const words = (() => {
  const GIB = 1024 ** 3;

  /** `7.32 GiB`, by vramprobe.units.format_bytes itself. */
  const bytes = (count) => vramprobe.formatBytes(count ?? null);
  const fixed = (value, digits) => vramprobe.fixed(value, digits);
  const gib = (count) => fixed(count / GIB, 2);
  const plain = (name) => name.replaceAll("_", " ");
  const count = (number) => number.toLocaleString("en-US");
  const percent = (share) => (share > 0 && share < 0.0005 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`);

  /** 8,030,261,248 → 8.03 B; what is below a tenth of a billion in M. */
  function params(number) {
    if (!number) return "";
    return number >= 1e8 ? `${(number / 1e9).toPrecision(3)} B` : `${(number / 1e6).toPrecision(3)} M`;
  }

  /** What a verdict compares, and the amounts, in prediction.py's words: `basis: amounts`. */
  const basis = (verdict) => verdict.reason.split(": ")[0];
  const amounts = (verdict) => verdict.reason.split(": ")[1];

  /** An element with its text and attributes; text is never HTML. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  /** A text in which the files of the repository that it names are links, where the page lies in one. */
  function linked(text) {
    const found = Object.entries(vramprobe.links).find(([name]) => text.includes(name));
    if (!found) return [text];
    const [name, href] = found, at = text.indexOf(name);
    return [text.slice(0, at), element("a", { href }, name), text.slice(at + name.length)];
  }

  return { GIB, bytes, gib, fixed, plain, count, percent, params, basis, amounts, element, linked };
})();
