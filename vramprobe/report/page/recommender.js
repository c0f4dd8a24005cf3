// Recommender: a cell's words, tokens and limits -> every option with its time and money, an option at a time.
//
// Every figure and every word is worked out by the translated modules ($speed, $recommend$recipes, $recommend$answer …);
// here are only plain objects in and out. Bytes, hours, US dollars.

const $speedFit = (() => {
  const {rates, ...fit} = $data.speed;
  const made = {rates: Object.assign(new $speed$rates.Rates(), rates), half_widths: $fromJson(fit.half_widths)};
  return $const(Object.assign(new $speed$rates.SpeedFit(), fit, made, {cards: $fromJson(fit.cards)}));
})();
function $shippedSpeed() { return $speedFit; }
const $kernels = Object.fromEntries(Object.entries($data.kernels).map(([name, table]) => [name, $const($fromJson(table))]));
function $kernelTables() { return $kernels; }
const $cardOf = new Map($gpus.map((gpu) => [gpu.slug, gpu.card]));
function $findGpu(slug) { return $cardOf.get(slug); }

const $offers = $data.offers.map((one) => $const(Object.assign(new $recommend$prices.Offer(), one)));
const $gpuOf = new Map($gpus.map((gpu) => [gpu.card, gpu]));
const $MOST_GPUS = $recommend$options.COUNTS.at(-1);

// As memory.predict_on and memory.fit_name: with the fit that ships for the card.
function $predictOn(spec, card) { return $predicted(spec, $gpuOf.get(card)); }
function $fitName(spec, card) {
  return spec.num_gpus === 1 && $fits.some((one) => one.model.device === "cuda" && one.gpu === card.short_name) ? card.short_name : "";
}

let $asked = null; // the config of the model that is asked about
// As spec.resolve: a CellSpec of these words, or why it cannot be.
function $resolved(words) {
  const {spec, errors} = resolve(Object.fromEntries($entries(words)), $asked);
  if (errors.length) throw new $Error(errors.map((one) => one.message).join("; "));
  return spec;
}

function $wrong(question) {
  const say = (name, wanted) => ({option: name, message: `${name}: ${question[name] ?? "nothing"} given; must be ${wanted}`});
  const isMore = (value) => typeof value === "number" && Number.isFinite(value) && value > 0;
  const isCount = (value) => Number.isInteger(value) && value >= 1;
  return [
    ...(isMore(question.tokens) ? [] : [say("tokens", "millions, more than 0")]),
    ...["deadline", "budget"].filter((name) => question[name] !== null && !isMore(question[name])).map((name) => say(name, "more than 0, or nothing")),
    ...(isCount(question.max_gpus) && question.max_gpus <= $MOST_GPUS ? [] : [say("max_gpus", `a whole number from 1 to ${$MOST_GPUS}`)]),
    ...(isCount(question.global_batch) ? [] : [say("global_batch", "a whole number of 1 or more")]),
  ];
}

// What the command's own options leave open or choose themselves.
const $CHOSEN_HERE = ["batch_size", "grad_accum", "gradient_checkpointing", "num_gpus", "sharding", "device", "stack"];

// Of a question {tokens in millions, deadline in hours, budget, max_gpus, global_batch, terms, every_method}: {errors} or
// {total, steps}. `steps` is a generator of how many options are done, at the end {answers, options, lacks}; none of its
// steps is long. Throws a Refusal.
function recommend(options, config, question) {
  const errors = $wrong(question);
  if (errors.length) return {errors};
  const given = Object.entries(options).filter(([name, value]) => value !== null && !$CHOSEN_HERE.includes(name));
  const {method, ...words} = Object.fromEntries(given.map(([name, value]) => [name, name === "lora_targets" ? String(value) : value]));
  const asked = $const(new $recommend$options.Question(
    $dict(Object.entries(words)), $list(question.every_method ? [...$recommend$options.METHODS] : [method]), $py.round(question.tokens * 1e6),
    question.deadline === null ? null : question.deadline * 3600, question.budget, question.global_batch, question.max_gpus,
  ));
  const offers = $const($list($offers.filter((one) => one.terms === question.terms)));
  const cards = $gpus.filter((gpu) => gpu.memory_bytes && offers.some((one) => one.gpu === gpu.slug)).map((gpu) => gpu.card);
  const counts = new Map(cards.map((card) => [card, $recommend$options.counts_of(asked, offers, card.short_name)]));
  const total = asked.methods.length * [...counts.values()].reduce((sum, one) => sum + one.length, 0);
  return {errors: [], total, steps: $steps(asked, config, offers, counts)};
}

function* $steps(asked, config, offers, counts) {
  const found = $const($list([])), lacks = {};
  let number = 0;
  for (const method of asked.methods) {
    const kitchen = new $recommend$recipes.Kitchen($recommend$options.words_of(asked, method), asked.global_batch, null, $speedFit, null);
    $keep(kitchen);
    const made = $const($list([]));
    for (const [card, its] of counts) for (const count of its) {
      $asked = config; // another question may have been asked between two steps
      for (const recipe of kitchen.fastest_first(card, count)) { // what option_of will ask about, so that no step is long
        yield number;
        $asked = config;
        if (kitchen.setting(recipe, card, count)?.verdict.verdict === "fits") break;
      }
      const one = $recommend$options.option_of(asked, kitchen, card, count, offers);
      if (one !== null) made.push($const(one));
      yield ++number;
    }
    found.push(...made);
    lacks[method] = $recommend$answer.what_it_lacks(made);
  }
  const answers = $const($recommend$answer.answers_of(asked, found));
  const options = [...$recommend$answer.judged(asked, found, answers)];
  return {answers: answers.map((one) => ({...one, option: options.findIndex((other) => other.setting === one.option?.setting)})), options: options.map($shown), lacks};
}

// An option's figures and their words; `headroom_bytes` of one card, negative where it does not fit.
function $shown(one) {
  const {setting, hours, usd, offer} = one, {verdict, estimate} = setting, words = $recommend$words;
  return {
    method: one.method, gpu: one.gpu, num_gpus: one.num_gpus, fits: one.fits, verdict: verdict.verdict, why_not: one.why_not,
    batch_size: setting.batch_size, grad_accum: setting.grad_accum, gradient_checkpointing: setting.gradient_checkpointing,
    sharding: setting.sharding, needed: $interval(verdict.needed_bytes), usable_bytes: verdict.usable_bytes,
    headroom_bytes: verdict.usable_bytes - verdict.needed_bytes.value, tokens_per_second: $interval(estimate.tokens_per_second),
    condition: estimate.condition, mfu: estimate.mfu, hours: $interval(hours), usd: $interval(usd),
    offer: offer === null ? null : {provider: offer.provider, date: offer.date, terms: offer.terms, usd_per_hour: offer.hourly(one.num_gpus)},
    words: {
      cards: words.cards_of(one), setting: words.setting_of(one), rate: words.rate_of(one), time: words.time_of(one), cost: words.cost_of(one),
      price: words.price_of(one), limits: words.limits_of(one),
    },
  };
}

// The command that recommends the same.
function recommendCommand(options, question) {
  const flag = (name, value) => `--${name.replaceAll("_", "-")}${value === true ? "" : ` ${value}`}`;
  const {model, method, seq_len, ...others} = Object.fromEntries(
    Object.entries(options).filter(([name, value]) => value !== null && value !== false && !$CHOSEN_HERE.includes(name)));
  const usual = {max_gpus: 8, global_batch: $recommend$options.GLOBAL_BATCH, terms: "on-demand"};
  return ["vramprobe recommend", flag("model", model), ...(question.every_method ? [] : [flag("method", method)]), flag("seq_len", seq_len),
    ...Object.entries(others).map(([name, value]) => flag(name, value)), flag("tokens", `${question.tokens}M`),
    ...(question.deadline === null ? [] : [flag("deadline", `${question.deadline}h`)]),
    ...(question.budget === null ? [] : [flag("budget", question.budget)]),
    ...Object.entries(usual).filter(([name, value]) => question[name] !== value).map(([name]) => flag(name, question[name]))].join(" ");
}

Object.assign(globalThis.vramprobe, {
  recommend, recommendCommand, terms: [...new Set($offers.map((one) => one.terms))], formatUsd: $units.format_usd, formatHours: $units.format_hours,
  speed: {sources: Object.keys($data.speed.sources).length, configurations: $data.speed.num_configurations, medianError: $data.speed.median_error, cards: $data.speed.cards},
});
