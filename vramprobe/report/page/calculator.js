// Calculator: the words of a cell -> its prediction, its verdict on a GPU, the largest batch and length that fit.
//
// Everything is counted, and every default filled, by the translated modules ($spec, $terms$step$walk, $predict$prediction …); here
// are only plain objects in and out. Sizes are bytes.

const $data = globalThis.engineData ?? JSON.parse(document.getElementById("engine-data").textContent); // a worker has no document

function $fromJson(it) { // dicts and tuples as the translated modules know them
  if (Array.isArray(it)) return $const($list(it.map($fromJson)));
  if (it !== null && typeof it === "object") return $const($dict(Object.entries(it).map(([key, value]) => [key, $fromJson(value)])));
  return it;
}

// A fit's tables by name are dicts, and two of its records have methods.
function $fitted(fit) {
  const ranges = {...fit.ranges, choices: $fromJson(fit.ranges.choices)};
  const tables = {coefficients: $fromJson(fit.coefficients), constant_bytes: $fromJson(fit.constant_bytes)};
  const widths = {half_width: $fromJson(fit.interval.half_width), covariance: $fromJson(fit.interval.covariance)};
  const interval = Object.assign(new $model$memory_model.IntervalWidth(), fit.interval, widths);
  return $const(Object.assign(new $model$memory_model.MemoryModel(), fit, {ranges, ...tables, interval}));
}

// Beside what the page shows of a GPU, the catalog's own record of it, which knows its kernels.
const $gpus = $data.gpus.map((gpu) => {
  const card = $const(Object.assign(new $catalog$gpus.Gpu(), gpu.card));
  return {...gpu, card, kernels: $kernelsOf(card), blas_workspace_bytes: card.blas_workspace_bytes};
});
const $fits = $data.fits.map(({gpu, model}) => ({gpu, model: $fitted(model)}));

// -- the cell ----------------------------------------------------------------------------------------------------------

const $COUNTS = ["batch_size", "seq_len", "grad_accum", "lora_r", "num_gpus", "shard_size", "cp_size", "num_layers"];
const $ALWAYS_GIVEN = ["model", "method", "batch_size", "seq_len"]; // what else there is has a default
const $SHARDING = "fsdp"; // of several GPUs, unless told

const $adapterOptions = $const($list($data.adapter_options));

function $problems(spec) {
  const problems = [];
  const say = (option, message) => problems.push({option, message});
  for (const name of $COUNTS) {
    const value = spec[name];
    if (value === null) continue;
    if (!Number.isInteger(value) || value < 1) say(name, `${name}: ${value ?? "nothing"} given; must be a whole number of 1 or more`);
  }
  for (const [name, allowed] of Object.entries($data.choices)) {
    const value = spec[name];
    if (value == null ? name === "method" : !allowed.includes(value)) say(name, `${name}: ${value ?? "nothing"} given; allowed: ${allowed.join(", ")}`);
  }
  const targets = spec.lora_targets;
  if (Array.isArray(targets) && !(targets.length && targets.every((one) => /^[\w.]+$/.test(one)))) {
    say("lora_targets", "lora_targets: write all-linear, q_v, or module names such as q_proj,v_proj");
  }
  return problems;
}

function $targets(given) {
  if (given == null || given === "all-linear" || given === "q_v") return given ?? null;
  const names = Array.isArray(given) ? given : String(given).split(",").map((one) => one.trim()).filter(Boolean);
  return $const($list(names));
}

function $filled(words, model_type) { return Object.fromEntries($entries($spec.with_defaults($dict(Object.entries(words)), model_type))); }

const $configs = new WeakMap();
function $configOf(config) {
  if (!$configs.has(config)) { // without who wrote it, as catalog/models.py reads it
    const kept = Object.entries(config).filter(([name]) => !$data.bookkeeping.includes(name));
    $configs.set(config, $fromJson(Object.fromEntries(kept)));
  }
  return $configs.get(config);
}

// A CellSpec, and beside its fields the GPUs that a rank is one of and the libraries that are asked for. Throws for a depth that the model has not.
function $cell(given, config) {
  const {num_gpus = 1, sharding = num_gpus > 1 ? $SHARDING : null, stack = null, ...words} = given;
  const values = $filled({device: "cuda", ...words, lora_targets: $targets(words.lora_targets)}, config.model_type);
  const whole = $configOf(config), architecture = values.num_layers == null ? whole : $catalog$depth.cut_depth(whole, values.num_layers);
  const built = $const($trainers.config_for(values.trainer ?? "sft", architecture));
  return Object.assign(new $spec.CellSpec(values.model, built), values, {num_gpus, sharding, stack});
}

// As predict/stack.py: the cell under the libraries that are asked for. Throws where its memory is not known there.
function $stacked(spec) {
  if (spec.stack === null) return spec;
  const found = $predict$stack.under_versions(spec, spec.stack, $const($dict(Object.entries($data.stacks[spec.stack]))));
  found.architecture = $const(found.architecture);
  return $const(found);
}

// The option where a reason is told: one without which there are fewer reasons, first if the reason names it; or one
// that it names; or null.
function $blamed(reason, reasons, given, config) {
  const mends = (name) => {
    const {[name]: _, ...others} = given;
    const left = $reasons($cell(others, config));
    return left.length < reasons.length && !left.includes(reason);
  };
  const named = Object.keys(given).filter((name) => new RegExp(`\\b${name}\\b`).test(reason));
  const mending = Object.keys(given).filter((name) => !$ALWAYS_GIVEN.includes(name) && mends(name));
  return mending.find((name) => named.includes(name)) ?? mending[0] ?? named[0] ?? null;
}

// Why a cell cannot be on any GPU, as rules/cell.py says it; what ranks cannot be is said by what predicts them.
function $reasons(spec) { return [...$items($rules$cell.reasons_against(spec))]; }

// {spec, errors}: a checked cell with every default, or what is wrong, each with the option where one is to blame.
function resolve(options, config) {
  const given = Object.fromEntries(Object.entries(options).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  if (config === null || typeof config !== "object" || typeof config.model_type !== "string") {
    return {spec: null, errors: [{option: "config", message: "the config must name its model_type, as a config.json does"}]};
  }
  let spec;
  try {
    spec = $cell(given, config);
  } catch (error) {
    if (!(error instanceof $Error)) throw error;
    return {spec: null, errors: [{option: "num_layers", message: error.message}]};
  }
  const errors = $problems(spec);
  if (errors.length) return {spec: null, errors};
  const reasons = $reasons(spec);
  try {
    if (!reasons.length) return {spec: $stacked(spec), errors: []};
  } catch (error) {
    if (!(error instanceof $Error)) throw error;
    return {spec: null, errors: [{option: "stack", message: error.message}]};
  }
  return {spec: null, errors: reasons.map((message) => ({option: $blamed(message, reasons, given, config), message}))};
}

// The command that measures the cell, or predicts one rank of several or what other libraries take: what differs from what is usual for it.
function command(spec) {
  const {rc, model, architecture, method, batch_size, seq_len, num_gpus, sharding, stack, ...fields} = spec;
  const verb = num_gpus > 1 || stack ? "predict" : "measure", nothing = new $spec.CellSpec();
  const written = [`vramprobe ${verb} --model ${model} --method ${method} --batch-size ${batch_size} --seq-len ${seq_len}`];
  for (const [name, its] of Object.entries(fields)) {
    const {[name]: _, ...others} = fields;
    const usual = {...nothing, device: "cuda", ...$filled({method, ...others}, spec.model_type)}[name];
    if (its === usual || its == null) continue;
    const flag = `--${name.replaceAll("_", "-")}`;
    written.push(its === true ? flag : `${flag} ${Array.isArray(its) ? its.join(",") : its}`);
  }
  if (num_gpus > 1) written.push(`--sharding ${sharding} --num-gpus ${num_gpus}`);
  if (stack) written.push(`--stack ${stack}`);
  return written.join(" ");
}

// -- the prediction ----------------------------------------------------------------------------------------------------

// As terms/step/moments.py, course_of: a step of a cell with batch and length left open, kept for the next that differs in these alone.
const $courses = new Map();
function $knownChanges(of_model) { return $list($data.technique_changes[Number(of_model)].map((change) => $dict(Object.entries(change)))); }
function $pinnedLibraries() { return $dict(Object.entries($data.libraries)); }

function $courseOf(spec, chip) {
  const arch = $archOf(spec.architecture);
  const sides = {batch_size: spec.batch_size === 1, seq_len: spec.seq_len === 1, grad_accum: spec.grad_accum === 1};
  const branch = [...$items($terms$cell$setup.branch_of(spec, arch))];
  const alike = {...spec, ...sides, kernels: [...chip.capability], model: null, num_gpus: null, sharding: null, shard_size: null, cp_size: null, cp_rotation: null, offload: null, stack: null, architecture: $idOf(spec.architecture)};
  const key = JSON.stringify([alike, branch]);
  if (!$courses.has(key)) {
    const tensors = $const($terms$cell$parameters.tensors(spec, arch)), trained = $const(tensors.filter((one) => one.trained));
    const idle = $const($terms$step$moments._idle_terms(spec, arch, tensors, $terms$cell$optimizer.allocated_state_bytes(spec, trained)));
    const at_step = $const($dict([
      ["gradients", $terms$step$moments._gradients_bytes(trained)],
      ["optimizer_temporaries", $terms$cell$optimizer.temporaries_bytes(spec, trained)],
    ]));
    const setup = $const($terms$cell$setup.setup_of(spec, arch, tensors, chip));
    const on_cuda = spec.device === "cuda";
    const left = on_cuda ? $terms$cell$remainders.of_what_stands(spec, tensors) : 0, of_gradients = on_cuda ? $terms$cell$remainders.of_gradients(trained) : 0;
    if ($courses.size >= 256) $courses.clear();
    $courses.set(key, {idle, at_step, left, of_gradients, ranks: $const($dict([])), rank_moments: $const($dict([])), get walk() { return $const($terms$step$walk.walk_of(setup)); }});
  }
  return $courses.get(key);
}

const $archs = new WeakMap();
function $archOf(config) {
  if (!$archs.has(config)) $archs.set(config, $const($architecture.architecture(config)));
  return $archs.get(config);
}

const $ids = new WeakMap();
function $idOf(config) {
  if (!$ids.has(config)) $ids.set(config, JSON.stringify($plain(config)));
  return $ids.get(config);
}
function $plain(it) {
  if (it instanceof $Dict) return Object.fromEntries($entries(it).map(([key, value]) => [key, $plain(value)]));
  return Array.isArray(it) ? it.map($plain) : it;
}

// As terms/step/moments.py, moments: the moments of a steady step that can be its peak.
function $moments(spec, chip = $kernels$chip.A100) {
  const {idle, at_step, walk, left, of_gradients} = $courseOf(spec, chip);
  const all = new Map($entries(at_step)).get("gradients");
  const remainders = (terms) => left + $shareOf(of_gradients, new Map($entries(terms)).get("gradients") ?? 0, all);
  const now = $const($union(idle, $dict([["batch", $terms$step$moments.batch_bytes(spec)]])));
  const places = [...$entries(walk.highest(spec.batch_size, spec.seq_len)), [$terms$step$moments._OPTIMIZER, at_step]];
  return $const($list(places.map(([[phase, place], terms]) =>
    new $terms$step$moments.Moment(phase, place, $const($terms$step$moments._in_order($union($union(now, terms), $dict([["block_remainders", remainders(terms)]]))))))));
}

// As terms/cell/remainders.py has it: their product is more than a number holds.
function $shareOf(remainders, gradients, all) { return Number(BigInt(remainders) * BigInt(gradients) / BigInt(Math.max(all, 1))); }

// The fit that ships for the cell's device: of the CPU any will do, of GPUs the card's own, else, for a replay, that of several
// of NVIDIA's cards; none of a rank, which is replayed without.
function $fitOf(spec, gpu, replays = false) {
  if (spec.num_gpus > 1) return null;
  const fits = $fits.filter((one) => one.model.device === spec.device);
  const own = spec.device === "cpu" ? fits[0] : gpu && fits.find((one) => one.gpu === gpu.slug);
  const several = () => fits.find((one) => one.model.cards.length > 1 && (gpu?.is_nvidia ?? true));
  return (own ?? (replays ? several() : null))?.model ?? null;
}
function $kernelsOf(card) { return [...$kernels$chip.chip_like(card).capability].join("."); } // which attention runs
function $kernelsOn(gpu) { return gpu == null ? $kernelsOf(null) : gpu.kernels ?? $kernelsOf(gpu); }
function $workspace(gpu) { return gpu?.blas_workspace_bytes ?? $model$memory_model.BLAS_WORKSPACE_BYTES; }
function hasFit(spec, gpu) { return $fitOf(spec, gpu) !== null; }
// Whether a prediction of the cell is by the allocator's replay where it may take its time.
function canReplay(spec, gpu) {
  if (spec.num_gpus > 1) return spec.device === "cuda" && $terms$sharding$ranks.is_logged(spec);
  const fit = spec.device === "cuda" ? $fitOf(spec, gpu, true) : null;
  return Boolean(fit?.allocated_over_replayed && fit.reserved_over_replayed);
}

// As model/replayed.py: the peaks of a cell's requests through the caching allocator. Cards whose kernels ask for the same
// have the same, so that a cell is played once for several.
const $played = new Map();
let $replaysLeft = Infinity; // that may be played before whoever asks is asked again
class $Pause {}
function $allocConf() { return new $allocator$config.AllocatorConfig(); } // the page asks for no other
function $replayed(spec, card) {
  const chip = $chipOf(card);
  const key = $keyOf(spec, card);
  if ($played.size >= 256 && !$played.has(key)) $played.clear();
  if (!$played.has(key)) $played.set(key, []);
  let same = $played.get(key).find(({asked}) => (asked === null || chip === null ? asked === chip : asked.is_alike(chip)));
  if (same === undefined) {
    if ($replaysLeft < 1) throw new $Pause();
    $replaysLeft -= 1;
    const {run, ledger, load_bytes} = $play(spec, card, new $allocator$ledger.Device());
    same = {asked: run.asked, peaks: $const(new $model$replayed.Replayed(ledger.allocated_peak, ledger.reserved_peak, load_bytes))};
    $played.get(key).push(same);
  }
  return same.peaks;
}

function $keyOf(spec, card) {
  return JSON.stringify([{...spec, rc: null, model: null, architecture: $idOf(spec.architecture)}, $kernelsOn(card), $workspace(card)]);
}

function $numAllocRetries(spec, card, limit_bytes) {
  try {
    return $play(spec, card, new $allocator$ledger.Device(null, limit_bytes)).ledger.num_alloc_retries;
  } catch (error) {
    if (error instanceof $allocator$ledger.OutOfMemory) return null;
    throw error;
  }
}

function $play(spec, card, device) {
  const allocator = new $allocator$allocator.CachingAllocator($allocConf(), device);
  const Kind = $terms$sharding$ranks.run_class(spec);
  const run = new Kind(spec, allocator, $workspace(card), $chipOf(card));
  return {run, ledger: allocator.ledger, load_bytes: $model$replayed.play(run, allocator)};
}
function $chipOf(card) { return card === null ? $kernels$chip.A100 : $model$replayed.chip_of(card); }

// What the fit makes of a cell, and why it refuses to vouch for it, if it does.
function $counted(spec, gpu, fit, replays, retries = false) {
  try {
    return {found: $predict$predict.predict(spec, fit, false, gpu?.card ?? null, replays, retries), refusal: null};
  } catch (error) {
    if (!(error instanceof $OutOfRange)) throw error;
    return {found: error.prediction, refusal: error};
  }
}

// As api.predict: with the fit that ships for the device, or by arithmetic alone; `replays` where the fit knows how far off
// that is.
function $predicted(spec, gpu, replays = false) {
  const {found, refusal} = $counted(spec, gpu, $fitOf(spec, gpu, replays), replays, replays);
  if (refusal === null) return found;
  const alone = $counted(spec, gpu, null, false).found;
  const notes = [...alone.warnings].filter((one) => one !== $predict$prediction.ALONE); // a fit ships, and is not used
  notes.push(`arithmetic alone: the fit that ships for ${spec.device} does not reach so far: ${refusal.prediction.warnings[0]}`);
  return {...alone, warnings: notes};
}

function $interval(it) { return it === null ? null : {value: it.value, low: it.low, high: it.high}; }
function $bytes(it) { return it && new $predict$prediction.Interval(it.value, it.low, it.high); }

// Bytes of each tier (null where no fit knows it), of each term at the peak, where the peak is, and what to know of it.
// With a fit of one GPU, that fit counts for this GPU alone; and with attention's kernels of this one. `replays`: by the
// allocator's replay where canReplay, which takes tenths of a second.
function predict(spec, config, gpu = null, replays = false) {
  const found = $predicted(spec, gpu, replays);
  const said = {
    cell_id: found.cell_id, peak_allocated_bytes: $interval(found.peak_allocated_bytes),
    reserved_bytes: $interval(found.reserved_bytes), device_bytes: $interval(found.device_bytes),
    peak_phase: found.peak_phase, peak_place: found.peak_label,
    terms: $entries(found.terms), constant_bytes: found.constant_bytes,
    within: found.within === null ? null : {limit_bytes: found.within.limit_bytes, num_alloc_retries: found.within.num_alloc_retries},
    fit: found.fit === null ? null : {...found.fit}, notes: [...found.warnings],
    cards: found.cards === null ? null : [...found.cards].map(({rc, ...card}) => card),
  };
  return Object.defineProperty(said, "cell", {value: {spec, config, gpu, replays}}); // for the verdict of another GPU
}

// Whether the cell fits: {verdict, tier, needed, usable_bytes, reason}. Throws where the GPU's memory is not known.
function verdict(prediction, gpu) {
  const {spec, config, gpu: other, replays} = prediction.cell;
  let refusal = null; // where the cell cannot run on this GPU at all
  const isAlike = $fitOf(spec, gpu) === $fitOf(spec, other) && $kernelsOn(gpu) === $kernelsOn(other) && $workspace(gpu) === $workspace(other);
  if (replays ? gpu !== other : !isAlike) {
    try {
      prediction = predict(spec, config, gpu, replays);
    } catch (error) {
      if (!(error instanceof $Error)) throw error;
      refusal = error.message;
    }
  }
  const {peak_allocated_bytes: allocated, reserved_bytes: reserved, device_bytes: device} = prediction;
  const tiers = {peak_allocated_bytes: $bytes(allocated), reserved_bytes: $bytes(reserved), device_bytes: $bytes(device)};
  const found = $predict$verdict.verdict({...tiers, within: prediction.within, num_gpus: spec.num_gpus, cards: prediction.cards}, gpu.card);
  const tier = device ? "device" : reserved ? "reserved" : "allocated";
  return {
    verdict: refusal ? "does not fit" : found.verdict, tier, needed: $interval(found.needed_bytes), usable_bytes: found.usable_bytes,
    reason: refusal ?? found.reason,
  };
}

// The largest batch and the largest length that fit, each with the other as it is; null where not even 1 does. `replays`: as
// predict --max-batch and --max-seq-len find them, where canReplay.
function largest(spec, config, gpu, replays = false) {
  const {Judged, largest_count, largest_replayed} = $predict$largest, verdict = (prediction) => $predict$verdict.verdict(prediction, gpu.card);
  const rough = (one) => {
    const prediction = $predicted(one, gpu);
    return new Judged(prediction, verdict(prediction), null);
  };
  const fit = $fitOf(spec, gpu, replays), own = $fitOf(spec, gpu);
  const judge = (one) => {
    const {found, refusal} = $counted(one, gpu, fit, true);
    return new Judged(found, verdict(found), refusal);
  };
  const found = (question) => {
    if (!replays || !canReplay(spec, gpu)) return largest_count(question, spec, rough, own);
    try {
      return largest_replayed(question, spec, judge, rough, fit);
    } catch (error) {
      if (!(error instanceof $OutOfRange)) throw error;
      return largest_count(question, spec, rough, own);
    }
  };
  const count = (question) => {
    try {
      return found(question).fits?.value ?? null;
    } catch (error) {
      if (error instanceof $Error) return null;
      throw error;
    }
  };
  // questions.max_seq_len does not look for the length where ranks share each
  return {batch_size: count("batch_size"), seq_len: spec.cp_size > 1 ? undefined : count("seq_len")};
}

// The same by the replay, for one replay more than when it was asked last: null until there is an answer. A search takes
// seconds, and whoever asks can leave it between two of them.
function lookForLargest(spec, config, gpu) {
  $replaysLeft = 1;
  try {
    return largest(spec, config, gpu, true);
  } catch (error) {
    if (error instanceof $Pause) return null;
    throw error;
  } finally {
    $replaysLeft = Infinity;
  }
}

// Other options to try, the mildest first, as predict tries them; a flag that is off is null, as the form has it.
function candidates(spec) {
  return [...$items($predict$changes.candidates(spec))].map((change) =>
    Object.fromEntries($entries(change).map(([name, value]) => [name, value === false ? null : value])));
}

globalThis.vramprobe = {
  catalog: $data.catalog, gpus: $gpus, choices: $data.choices, fits: $data.fits, hasFit, canReplay, resolve, predict, verdict, largest, lookForLargest, command,
  candidates, hybrid: $data.hybrid, meanings: $data.meanings, oneBatch: $data.one_batch, links: $data.links ?? {}, leastShare: $predict$changes.LEAST_SHARE,
  formatBytes: $units.format_bytes, fixed: $fixed, Refusal: $Error,
};
