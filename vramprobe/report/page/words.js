// Amounts and names in words, as units.py writes them. Never computes memory.
"use strict";

const byId = (id) => document.getElementById(id);

const words = (() => {
  const GIB = 1024 ** 3;

  /** `7.32 GiB`, as units.format_bytes. */
  function bytes(count) {
    const [unit, size] = [["GiB", GIB], ["MiB", GIB / 1024], ["KiB", 1024]].find(([, least]) => Math.abs(count) >= least) ?? ["B", 1];
    return `${size === 1 ? count : fixed(count / size, 2)} ${unit}`;
  }

  /** A tie goes to the even digit, as Python rounds; only odd multiples of 1 / 2^(digits + 1) are ties. */
  function fixed(value, digits) {
    const halves = value * 2 ** (digits + 1);
    if (!Number.isInteger(halves) || halves % 2 === 0) return value.toFixed(digits);
    const below = Math.floor(value * 10 ** digits);
    return ((below % 2 === 0 ? below : below + 1) / 10 ** digits).toFixed(digits);
  }

  const gib = (count) => fixed(count / GIB, 2);
  const plain = (name) => name.replaceAll("_", " ");
  const count = (number) => number.toLocaleString("en-US");
  const percent = (share) => (share > 0 && share < 0.0005 ? "< 0.1%" : `${(100 * share).toFixed(1)}%`);

  /** 8,030,261,248 → 8.03 B; what is below a tenth of a billion in M. */
  const params = (number) => (!number ? "" : number >= 1e8 ? `${(number / 1e9).toPrecision(3)} B` : `${(number / 1e6).toPrecision(3)} M`);

  /** An element with its text and attributes; text is never HTML. */
  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  return { GIB, bytes, gib, fixed, plain, count, percent, params, element };
})();
