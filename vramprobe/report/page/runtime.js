// Runtime: what the translated arithmetic (translation/) needs of Python: reference counts, dicts and operators.
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
  _asdict() { return $dict(Object.entries(this).filter(([name]) => name !== "rc" && !name.startsWith("$"))); }
  * [Symbol.iterator]() { for (const [name, value] of Object.entries(this)) if (name !== "rc" && !name.startsWith("$")) yield value; }
}
function $replace(it, values) { return it._replace(values); } // dataclasses.replace
class $Object {
  constructor() { this.rc = 0; $born(this); }
}

// A class of two bases: the first is made anew over the second, as Python's order has them where the first's own base is
// an ancestor of the second.
function $over(First, Second) {
  const made = (one) => (Object.hasOwn(one, "$make") ? one.$make : one), own = made(Object.getPrototypeOf(First));
  for (let one = Second; one !== $Object; one = Object.getPrototypeOf(one)) if (made(one) === own) return First.$make(Second);
  throw new $Error(`${First.name} does not go before ${Second.name}`);
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

// One thing's end is that of what it held, and so on: what is further down than a stack may go waits for the first to be over.
const $DEEPEST = 500, $waiting = [];
let $depth = 0;
function $end(it) {
  it.rc = -Infinity; // whatever happens below, it ends once
  if ($depth === $DEEPEST) { $waiting.push(it); return; }
  $depth++;
  try {
    $undo(it);
    while ($depth === 1 && $waiting.length) $undo($waiting.pop());
  } finally { $depth--; }
}
function $undo(it) {
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

// What nobody can end meanwhile is gone through as it is.
function $items(source) {
  return Array.isArray(source) && (source.rc === undefined || source.rc === Infinity) ? source : $held(source);
}
function* $held(source) {
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
  if (Array.isArray(owner)) { $release(owner.splice(key < 0 ? owner.length + key : key, 1)[0]); return; }
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
  return $same(left, right) || (left instanceof $Frozen && right instanceof $Frozen && $areAlike(left, right));
}
function $areAlike(left, right) { // records, by what is in them
  return left.constructor === right.constructor && Object.keys(left).every((name) =>
    name === "rc" || name.startsWith("$") || $equal(left[name], right[name]));
}
function $less(left, right) {
  if (!Array.isArray(left)) return left < right;
  for (let at = 0; at < left.length && at < right.length; at++) {
    if (left[at] !== right[at] && !$equal(left[at], right[at])) return $less(left[at], right[at]);
  }
  return left.length < right.length;
}
function $in(one, of) {
  if (typeof of === "string") return of.includes(one);
  if (of instanceof $Dict) return of.has(one);
  return [...of].some((other) => $equal(one, other));
}
// Sizes in which batch and length are left open are BigInts (terms/tape/sizes.py); one meets a plain number as an equal.
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
  if (Array.isArray(right)) return $mul(right, left);
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
// Of whole numbers in two's complement, in halves of 32 bits, for JavaScript's own operator has no more.
const $HALF = 2 ** 32;
function $intersection(left, right) {
  if (typeof left === "number") return (Math.floor(left / $HALF) & Math.floor(right / $HALF)) * $HALF + ((left & right) >>> 0);
  return $asSet([...left].filter((one) => $in(one, right)));
}
function $lshift(number, bits) { return number * 2 ** bits; }
function $rshift(number, bits) { return Math.floor(number / 2 ** bits); }
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
  const digits = /\.(\d+)f/.exec(how), text = digits ? $fixed(value, Number(digits[1])) : $py.str(value);
  return how.includes(",") ? text.replace(/\B(?=(\d{3})+(?!\d))(?<!\.\d*)/g, ",") : text;
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
