// Runtime: what the translated arithmetic (translation/) needs of Python: reference counts, and a few of its built-ins.
//
// A tracked object (list, dict, closure, record, instance) carries `rc`. A new one has 0 and belongs to nobody; keep() takes it,
// release() lets go, and at 0 it ends: what it held is released, and a Value's __del__ gives its bytes back to the tape.
// Numbers and strings are not tracked.
"use strict";

class $Error extends Error {}
class $OutOfRange extends $Error {
  constructor(message, prediction) { super(message); this.prediction = prediction; }
}
class $Frozen { // a record: a dataclass, a NamedTuple, one of pydantic's
  constructor() { this.rc = 0; $born(this); }
  model_copy(update) {
    const made = Object.create(Object.getPrototypeOf(this), Object.getOwnPropertyDescriptors(this));
    for (const [name, value] of $entries(update)) made[name] = value;
    for (const name of Object.keys(made)) $keep(made[name]);
    made.rc = 0;
    return $born(made);
  }
  _replace(values) {
    const made = this.model_copy(values);
    for (const name of Object.keys(made)) if (name.startsWith("$")) delete made[name]; // what was worked out of the old values
    return made;
  }
  * [Symbol.iterator]() { for (const [name, value] of Object.entries(this)) if (name !== "rc" && !name.startsWith("$")) yield value; }
}
class $Object {
  constructor() { this.rc = 0; $born(this); }
}

// -- reference counts --------------------------------------------------------------------------------------------------

let $nursery = null; // inside suppress(): what was made there, so that an exception strands nothing

function $born(made) { if ($nursery !== null) $nursery.push(made); return made; }

function $keep(it) { if (it !== null && it !== undefined && it.rc !== undefined) it.rc++; return it; }

function $release(it) {
  if (it !== null && it !== undefined && it.rc !== undefined && --it.rc === 0) $end(it);
}

// A result on its way out of its function: its local is gone, and nobody has taken it yet.
function $float(it) { if (it !== null && it !== undefined && it.rc !== undefined) it.rc--; }

function $floated(it) { $float(it); return it; }

function $drop(it) {
  if (it !== null && it !== undefined && it.rc === 0) $end(it);
  return it;
}

function $set(before, now) { $keep(now); $release(before); return now; }

function $end(it) {
  it.rc = -Infinity; // whatever happens below, it ends once
  if (Array.isArray(it)) { for (const one of it) $release(one); return; }
  if (it instanceof $Dict) { for (const [key, value] of it.map.values()) { $release(key); $release(value); } return; }
  if (typeof it === "function") { for (const one of it.held) $release(one); return; }
  if (it.__del__ !== undefined) it.__del__();
  for (const name in it) if (name !== "rc") $release(it[name]);
}

function $const(it) { // what is kept for good, and so is what is in it
  if (it === null || typeof it !== "object" || it.rc === undefined || it.rc === Infinity) return it;
  it.rc = Infinity;
  const held = it instanceof $Dict ? $entries(it).flat() : Array.isArray(it) ? it : Object.values(it);
  for (const one of held) $const(one);
  return it;
}

function $list(items) { for (const one of items) $keep(one); items.rc = 0; return $born(items); }

function $closure(call, held) { for (const one of held) $keep(one); call.held = held; call.rc = 0; return $born(call); }

// A list of what is in others, which may end with it.
function $from(others, items) {
  const made = $list(items);
  for (const one of others) $drop(one);
  return made;
}

// Use of a result that nobody has taken: it lives until the use is over.
function $of(owner, use) {
  $keep(owner);
  let result;
  try { return result = $keep(use(owner)); } finally { $release(owner); $float(result); }
}

function $watch() { const before = $nursery; $nursery = []; return {before}; }
function $unwatch(watched) {
  if (watched.before !== null) for (const one of $nursery) watched.before.push(one);
  $nursery = watched.before;
}
function $sweep(watched, error, expected) {
  if (!(error instanceof expected)) throw error;
  for (const one of $nursery) $drop(one);
}

function $enter(manager) { // of a generator with one yield
  const first = manager.next();
  return {value: first.value, exit() { manager.next(); }};
}

// functools.lru_cache: what a call with equal arguments gave before, kept for good; results know no Value of a tape.
function $cached(use) {
  const results = new Map();
  return (...given) => {
    const key = given.map($described).join("\u0002");
    if (!results.has(key)) {
      if (results.size >= 256) results.clear();
      results.set(key, $const(use(...given)));
    } else for (const one of given) $drop(one);
    return results.get(key);
  };
}
const $descriptions = new WeakMap(); // of what is kept for good, which nothing changes any more
function $described(it) {
  if (typeof it === "function") return "";
  if (it === null || typeof it !== "object") return typeof it + String(it);
  if ($descriptions.has(it)) return $descriptions.get(it);
  const parts = it instanceof $Dict ? $entries(it).flat() : Array.isArray(it) ? it : [...it];
  const text = `${it.constructor.name}(${parts.map($described).join("\u0001")})`;
  if (it.rc === Infinity) $descriptions.set(it, text);
  return text;
}

// -- dicts, by Python's idea of equal keys -----------------------------------------------------------------------------

class $Dict {
  constructor() { this.map = new Map(); this.rc = 0; $born(this); }
  static key(key) { return Array.isArray(key) ? "\u0001" + key.map($Dict.key).join("\u0000") : key; }
  has(key) { return this.map.has($Dict.key(key)); }
  get(key) { const found = this.map.get($Dict.key(key)); return found === undefined ? undefined : found[1]; }
  set(key, value) {
    const under = $Dict.key(key), found = this.map.get(under);
    if (found === undefined) this.map.set(under, [$keep(key), $keep(value)]);
    else found[1] = $set(found[1], value);
    return this;
  }
}

function $dict(entries) {
  const made = new $Dict();
  for (const [key, value] of entries) made.set(key, value);
  return made;
}
function $entries(dict) { return [...dict.map.values()]; }

// Keywords that are known only at a call, in the order of its parameters.
function $named(names, pairs) {
  const values = new Map(pairs);
  return names.map((name) => values.get(name));
}

// -- iteration and access ----------------------------------------------------------------------------------------------

function* $items(source) {
  $keep(source);
  try {
    if (source instanceof $Dict) for (const [key] of [...source.map.values()]) yield key;
    else yield* source;
  } finally { $release(source); }
}

function $parts(source, count) {
  const parts = Array.isArray(source) ? source : [...source];
  if (parts.length !== count) throw new $Error(`${parts.length} values to unpack into ${count}`);
  return parts;
}

function $starred(source, before, after) { // first, *others, last = source
  const parts = [...source], end = parts.length - after;
  return [...parts.slice(0, before), $list(parts.slice(before, end)), ...parts.slice(end)];
}

function $get(owner, key) {
  if (Array.isArray(owner) || typeof owner === "string") return owner[key < 0 ? owner.length + key : Number(key)];
  if (!owner.has(key)) throw new $Error(`no ${key} here`);
  return owner.get(key);
}
function $setitem(owner, key, value) {
  if (Array.isArray(owner)) { const at = key < 0 ? owner.length + key : key; owner[at] = $set(owner[at], value); }
  else owner.set(key, value);
}
function $delitem(owner, key) {
  const [old, value] = owner.map.get($Dict.key(key));
  owner.map.delete($Dict.key(key));
  $release(old);
  $release(value);
}
function $slice(source, start, stop, step) {
  const cut = step === -1 ? [...source].reverse() : source.slice(start ?? 0, stop ?? undefined);
  return typeof source === "string" ? [...cut].join("") : $from([source], cut);
}

// -- operators ---------------------------------------------------------------------------------------------------------

function $true(it) {
  if (Array.isArray(it)) return it.length > 0;
  if (it instanceof $Dict) return it.map.size > 0;
  return Boolean(it);
}
function $and(left, right) { return $true(left) ? right() : left; }
function $or(left, right) { return $true(left) ? left : right(); }
function $same(left, right) {
  return left === right || (left == null && right == null) || ($isBig(left, right) && left == right);
}
function $equal(left, right) {
  if (Array.isArray(left) && Array.isArray(right)) {
    if (left.isSet) return left.length === right.length && left.every((one) => $in(one, right));
    return left.length === right.length && left.every((one, index) => $equal(one, right[index]));
  }
  return $same(left, right);
}
function $less(left, right) {
  if (!Array.isArray(left)) return left < right;
  const at = left.findIndex((one, index) => !$equal(one, right[index]));
  return at < 0 ? left.length < right.length : at >= right.length ? false : $less(left[at], right[at]);
}
function $in(one, of) {
  if (typeof of === "string") return of.includes(one);
  if (of instanceof $Dict) return of.has(one);
  return [...of].some((other) => $equal(one, other));
}
// Sizes in which batch and length are left open are BigInts (terms/sizes.py); one meets a plain number as an equal.
function $isBig(left, right) { return typeof left === "bigint" || typeof right === "bigint"; }
function $add(left, right) {
  if (Array.isArray(left)) return $from([left, right], [...left, ...right]);
  return $isBig(left, right) ? BigInt(left) + BigInt(right) : left + right;
}
function $sub(left, right) {
  if (left.isSet) return $asSet(left.filter((one) => !$in(one, right)));
  return $isBig(left, right) ? BigInt(left) - BigInt(right) : left - right;
}
function $mul(left, right) {
  if (Array.isArray(left)) {
    const made = [];
    for (let count = 0; count < right; count++) made.push(...left);
    return $from([left], made);
  }
  return $isBig(left, right) ? BigInt(left) * BigInt(right) : left * right;
}
function $mod(left, right) {
  const isBig = $isBig(left, right), by = isBig ? BigInt(right) : right, rest = (isBig ? BigInt(left) : left) % by;
  return rest != 0 && rest < 0 !== by < 0 ? rest + by : rest;
}
function $floordiv(left, right) {
  const whole = $sub(left, $mod(left, right));
  return typeof whole === "bigint" ? whole / BigInt(right) : whole / right;
}
function $pow(left, right) { return typeof left === "bigint" ? left ** BigInt(right) : left ** right; }
function $union(left, right) {
  const made = left instanceof $Dict ? $dict([...$entries(left), ...$entries(right)]) : $asSet([...left, ...right]);
  $drop(left);
  $drop(right);
  return made;
}
function $intersection(left, right) { return $asSet([...left].filter((one) => $in(one, right))); }
function $extend(left, right) {
  if (!Array.isArray(left)) return $add(left, right);
  for (const one of $items(right)) left.push($keep(one));
  return left;
}
function $asSet(items) {
  const unique = [];
  for (const one of items) if (!$in(one, unique)) unique.push(one);
  unique.isSet = true;
  return $list(unique);
}
function $format(value, how) {
  if (typeof value === "number" && how.includes(",")) return value.toLocaleString("en-US");
  const digits = /\.(\d+)f/.exec(how);
  return digits ? $fixed(value, Number(digits[1])) : $py.str(value);
}
// A tie goes to the even digit, as Python rounds; only odd multiples of 1 / 2^(digits + 1) are ties.
function $fixed(value, digits) {
  const halves = value * 2 ** (digits + 1);
  if (!Number.isInteger(halves) || halves % 2 === 0) return value.toFixed(digits);
  const below = Math.floor(value * 10 ** digits);
  return ((below % 2 === 0 ? below : below + 1) / 10 ** digits).toFixed(digits);
}
function $isinstance(it, kind) {
  if (Array.isArray(kind)) return kind.some((one) => $isinstance(it, one));
  switch (kind) {
    case "int": return Number.isInteger(it) || typeof it === "boolean";
    case "float": return typeof it === "number" && !Number.isInteger(it);
    case "bool": return typeof it === "boolean";
    case "str": return typeof it === "string";
    case "None": return it == null;
    case "Mapping": case "dict": return it instanceof $Dict;
    case "list": case "tuple": return Array.isArray(it);
  }
  return it instanceof kind;
}

// -- Python's own functions --------------------------------------------------------------------------------------------

// They take what they are given as an argument is taken: what nobody else holds ends with the call.
function $eager(use) {
  return (source, ...rest) => {
    $keep(source);
    let result;
    try { return result = $keep(use(source, ...rest)); } finally { $release(source); $float(result); }
  };
}
function $best(isBetter) {
  return (...given) => {
    const options = given.length && Object.getPrototypeOf(given.at(-1) ?? 0) === Object.prototype ? given.pop() : {};
    const items = given.length === 1 ? [...$items(given[0])] : given, key = options.key ?? ((one) => one);
    if (!items.length) return options.default;
    let best = items[0], height = key(best);
    for (const one of items.slice(1)) { const its = key(one); if (isBetter(its, height)) { best = one; height = its; } }
    return best;
  };
}
const $py = {
  abs: Math.abs,
  all: $eager((source) => [...$items(source)].every($true)),
  any: $eager((source) => [...$items(source)].some($true)),
  bool: (it) => $true(it),
  dict: $eager((source) => source === undefined ? new $Dict() : $dict(source instanceof $Dict ? $entries(source) : source)),
  enumerate: function* (source, options) { let at = options?.start ?? 0; for (const one of $items(source)) yield [at++, one]; },
  float: Number,
  frozenset: $eager((source) => $asSet(source === undefined ? [] : $items(source))),
  getattr: (owner, name, otherwise) => owner[name] === undefined ? otherwise : owner[name],
  int: Math.trunc,
  iter: (source) => source,
  len: (source) => source instanceof $Dict ? source.map.size : source.length,
  list: $eager((source) => $list(source === undefined ? [] : [...$items(source)])),
  max: $best((one, other) => $less(other, one)),
  min: $best($less),
  next: $eager((source, otherwise) => { for (const one of $items(source)) return one; return otherwise; }),
  range: function* (first, last, step = 1) {
    const [start, stop] = last === undefined ? [0, first] : [first, last];
    for (let at = start; step > 0 ? at < stop : at > stop; at += step) yield at;
  },
  repr: (it) => typeof it === "string" ? `'${it}'` : $py.str(it),
  reversed: (source) => [...source].reverse(),
  // Python rounds a half to the even neighbour.
  round: (it) => { const down = Math.floor(it), rest = it - down; return rest === 0.5 ? down + (down % 2) : Math.round(it); },
  set: $eager((source) => $asSet(source === undefined ? [] : $items(source))),
  sorted: $eager((source) => $list([...$items(source)].sort((one, other) => $less(other, one) - $less(one, other)))),
  str: (it) => it === null || it === undefined ? "None" : it === true ? "True" : it === false ? "False"
    : Array.isArray(it) ? `(${it.map($py.repr).join(", ")})` : String(it),
  sum: $eager((source, start = 0) => { let total = start; for (const one of $items(source)) total = $add(total, typeof one === "boolean" ? Number(one) : one); return total; }),
  tuple: $eager((source) => $list(source === undefined ? [] : [...$items(source)])),
  zip: function* (...sources) {
    const all = sources.map((source) => [...$items(source)]);
    for (let at = 0; at < Math.min(...all.map((one) => one.length)); at++) yield all.map((one) => one[at]);
  },
};

// Methods of Python's own types, for objects that have none of this name.
const $method = {};
function $define(name, use) {
  $method[name] = (owner, ...rest) =>
    owner instanceof $Object || owner instanceof $Frozen ? owner[name](...rest) : use(owner, ...rest);
}
$define("add", (set, one) => { if (!$in(one, set)) set.push($keep(one)); });
$define("append", (list, one) => { list.push($keep(one)); });
$define("bit_length", (number) => number.toString(2).length);
$define("clear", (owner) => {
  const held = owner instanceof $Dict ? $entries(owner).flat() : [...owner];
  if (owner instanceof $Dict) owner.map.clear(); else owner.length = 0;
  for (const one of held) $release(one);
});
$define("copy", (owner) => owner instanceof $Dict ? $dict($entries(owner)) : $list([...owner]));
$define("count", (owner, one) => owner.split(one).length - 1);
$define("endswith", (text, end) => Array.isArray(end) ? end.some((one) => text.endsWith(one)) : text.endsWith(end));
$define("extend", (list, more) => { $extend(list, more); });
$define("fromkeys", (_, keys, value = null) => $dict([...$items(keys)].map((key) => [key, value])));
$define("get", (dict, key, otherwise = null) => dict.has(key) ? dict.get(key) : otherwise);
$define("index", (list, one) => list.findIndex((other) => $equal(one, other)));
$define("items", (dict) => $entries(dict));
$define("join", (by, texts) => [...$items(texts)].join(by));
$define("keys", (dict) => $entries(dict).map(([key]) => key));
$define("lower", (text) => text.toLowerCase());
$define("partition", (text, by) => { const at = text.indexOf(by); return at < 0 ? [text, "", ""] : [text.slice(0, at), by, text.slice(at + by.length)]; });
$define("pop", (owner, key, otherwise) => {
  if (Array.isArray(owner)) return $floated(owner.pop());
  if (!owner.has(key)) return otherwise;
  const [its, value] = owner.map.get($Dict.key(key));
  owner.map.delete($Dict.key(key));
  $release(its);
  return $floated(value);
});
$define("removeprefix", (text, start) => text.startsWith(start) ? text.slice(start.length) : text);
$define("removesuffix", (text, end) => end && text.endsWith(end) ? text.slice(0, -end.length) : text);
$define("replace", (text, one, other) => text.replaceAll(one, other));
$define("rpartition", (text, by) => { const at = text.lastIndexOf(by); return at < 0 ? ["", "", text] : [text.slice(0, at), by, text.slice(at + by.length)]; });
$define("rstrip", (text, of) => { let end = text.length; while (end && of.includes(text[end - 1])) end--; return text.slice(0, end); });
$define("setdefault", (dict, key, value) => { if (!dict.has(key)) dict.set(key, value); return dict.get(key); });
$define("split", (text, by) => text.split(by));
$define("startswith", (text, start) => Array.isArray(start) ? start.some((one) => text.startsWith(one)) : text.startsWith(start));
$define("strip", (text) => text.trim());
$define("subtract", (counts, items) => { for (const one of $items(items)) counts.set(one, (counts.get(one) ?? 0) - 1); });
$define("title", (text) => text.replace(/\b\w/g, (one) => one.toUpperCase()));
$define("update", (dict, more) => { for (const [key, value] of $entries(more)) dict.set(key, value); });
$define("upper", (text) => text.toUpperCase());
$define("values", (dict) => $entries(dict).map(([, value]) => value));

function $counter(items) { // collections.Counter: how often each occurs
  const counts = new $Dict();
  for (const one of $items(items)) counts.set(one, (counts.get(one) ?? 0) + 1);
  return counts;
}

const $math = {
  floor: Math.floor, log2: Math.log2,
  prod: $eager((source) => { let product = 1; for (const one of $items(source)) product = $mul(product, one); return product; }),
};

// terms/sizes.py: stand-ins for a batch and a length that are left open, so that one walk answers for all of them.
class $OpenSizes extends $Frozen {
  constructor(batch_size, seq_len, digit_bits) {
    super();
    this.bits = BigInt(digit_bits);
    this.mask = (1n << this.bits) - 1n;
    this.batch_size = batch_size === 1 ? 1 : 1n << this.bits;
    this.seq_len = seq_len === 1 ? 1 : 1n << (2n * this.bits);
    this.spare = 0n;
    for (let position = 1n; position <= 6n; position++) this.spare += 1n << (position * this.bits - 1n);
  }
  digits = (count) => {
    const digits = [];
    for (let rest = BigInt(count); digits.length < 6; rest >>= this.bits) digits.push(Number(rest & this.mask));
    return $list(digits);
  };
  covers = (count, other) => ((BigInt(count) + this.spare - BigInt(other)) & this.spare) === this.spare;
}
const $sizes = {
  open_sizes: (batch_size, seq_len, digit_bits) => new $OpenSizes(batch_size, seq_len, digit_bits),
  monomials: (b, s) => [1, b, s, b * s, s * s, b * s * s],
};
