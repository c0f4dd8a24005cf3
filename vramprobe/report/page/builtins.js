// Python's own functions, methods and modules, as the translated arithmetic calls them; runtime.js counts references.

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
  range: (first, last, step = 1) => { // an array, which may be gone through more than once
    const [start, stop] = last === undefined ? [0, first] : [first, last], made = [];
    for (let at = start; step > 0 ? at < stop : at > stop; at += step) made.push(at);
    return made;
  },
  repr: (it) => typeof it === "string" ? `'${it}'` : $py.str(it),
  reversed: (source) => [...source].reverse(),
  // Python rounds a half to the even neighbour.
  round: (it) => { const down = Math.floor(it), rest = it - down; return rest === 0.5 ? down + (down % 2) : Math.round(it); },
  set: $eager((source) => $asSet(source === undefined ? [] : $items(source))),
  sorted: $eager((source, options) => {
    const keyed = [...$items(source)].map((one) => [options?.key ? $keep(options.key(one)) : one, one]);
    keyed.sort(([one], [other]) => $less(other, one) - $less(one, other));
    return $list(keyed.map(([, one]) => one));
  }),
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
$define("bit_length", (number) => (number === 0 ? 0 : number.toString(2).length));
$define("clear", (owner) => {
  const held = owner instanceof $Dict ? $entries(owner).flat() : [...owner];
  if (owner instanceof $Dict) owner.map.clear(); else owner.length = 0;
  for (const one of held) $release(one);
});
$define("copy", (owner) => owner instanceof $Dict ? $dict($entries(owner)) : $list([...owner]));
$define("count", (owner, one) => Array.isArray(owner) ? owner.filter((other) => $equal(one, other)).length : owner.split(one).length - 1);
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
  if (Array.isArray(owner)) {
    if (key) throw new $Error("only the first or the last of a list is popped here");
    return $floated(key === 0 ? owner.shift() : owner.pop());
  }
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
  gcd: (one, other) => { while (other) [one, other] = [other, one % other]; return one; },
  prod: $eager((source) => { let product = 1; for (const one of $items(source)) product = $mul(product, one); return product; }),
};

// terms/tape/sizes.py: stand-ins for a batch and a length that are left open, so that one walk answers for all of them.
class $OpenSizes extends $Frozen {
  constructor(batch_size, seq_len, digit_bits, num_others = 0) {
    super();
    this.bits = BigInt(digit_bits);
    this.mask = (1n << this.bits) - 1n;
    this.batch_size = batch_size === 1 ? 1 : 1n << this.bits;
    this.seq_len = seq_len === 1 ? 1 : 1n << (2n * this.bits);
    this.num_others = num_others;
    this.spare = 0n;
    for (let position = 1; position <= 6 + num_others; position++) this.spare += 1n << (BigInt(position) * this.bits - 1n);
  }
  with_others = (count) => new $OpenSizes(this.batch_size, this.seq_len, this.bits, count);
  other = (index) => 1n << (BigInt(6 + index) * this.bits);
  closed = (count, others) => {
    let total = BigInt(count) & ((1n << (6n * this.bits)) - 1n), rest = BigInt(count) >> (6n * this.bits);
    for (let at = 0; rest; at++, rest >>= this.bits) total += (rest & this.mask) * BigInt(others[at]);
    return total;
  };
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

// bisect: where something belongs in a list that is in order, before all that are not less.
const $bisect = {
  bisect_left: (list, one) => {
    let low = 0, high = list.length;
    while (low < high) { const middle = (low + high) >>> 1; if ($less(list[middle], one)) low = middle + 1; else high = middle; }
    return low;
  },
  insort: (list, one) => { list.splice($bisect.bisect_left(list, one), 0, $keep(one)); }, // no two of these are equal
};
function* $groupby(source, key) { // itertools.groupby: [key, items] of each run
  let run = null;
  for (const one of $items(source)) {
    const its = key(one);
    if (run !== null && $equal(run[0], its)) { run[1].push(one); continue; }
    if (run !== null) yield [run[0], $list(run[1])];
    run = [its, [one]];
  }
  if (run !== null) yield [run[0], $list(run[1])];
}
