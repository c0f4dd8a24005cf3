// What the user has chosen ⇄ the URL's hash, with short keys and only what differs from the start.
// In: text of a link. Out: a state, and what of the link could not be understood. Checks names, not combinations.
"use strict";

const state = (() => {
  /** The slug that stands for a pasted config.json, and the file name in the command line. */
  const PASTED = "config.json";
  /** A link that is longer than this breaks in chats and mails. */
  const MAX_CONFIG_CHARACTERS = 4000;
  /**
   * Every option of the form: its key in a link and what it is typed as. A `flag` needs nothing but its line here: the
   * form makes its checkbox (under "More options" where it is of `more`), the link and the engine take it by its name.
   * `methods`: those it is of use to.
   */
  const OPTIONS = {
    model: { key: "m", kind: "model" },
    method: { key: "t", kind: "method" },
    batch_size: { key: "b", kind: "number" },
    seq_len: { key: "s", kind: "number" },
    gradient_checkpointing: { key: "gc", kind: "flag", label: "Gradient checkpointing" },
    fused_linear_cross_entropy: { key: "fl", kind: "flag", label: "Fused loss (Liger)" },
    num_gpus: { key: "n", kind: "number" },
    sharding: { key: "sh", kind: "choice" },
    shard_size: { key: "ss", kind: "number" },
    cp_size: { key: "cp", kind: "number" },
    cp_rotation: { key: "cr", kind: "choice" },
    offload: { key: "of", kind: "choice" },
    lora_r: { key: "r", kind: "number" },
    lora_targets: { key: "lt", kind: "text" },
    quant: { key: "q", kind: "choice" },
    optim: { key: "o", kind: "choice" },
    dtype: { key: "d", kind: "choice" },
    autocast: { key: "ac", kind: "choice" },
    attn: { key: "a", kind: "choice" },
    trainer: { key: "tr", kind: "choice", more: true },
    loss: { key: "lo", kind: "choice", more: true },
    grad_accum: { key: "ga", kind: "number", more: true },
    lora_dropout: { key: "ld", kind: "number", more: true },
    lora_dtype: { key: "ldt", kind: "choice", more: true },
    kbit_prep: { key: "kp", kind: "choice", more: true },
    stack: { key: "st", kind: "choice", more: true },
    num_layers: { key: "nl", kind: "number", more: true },
    dora: { key: "do", kind: "flag", label: "DoRA", more: true, methods: "lora qlora" },
  };
  const NAMES = Object.keys(OPTIONS);
  /** What is asked below the calculator: the key in a link, what the page opens with. A number or nothing, a choice, a flag. */
  const QUESTION = {
    tokens: { key: "tk", start: 50 }, deadline: { key: "dl", start: null }, budget: { key: "bu", start: null },
    max_gpus: { key: "mg", start: 8 }, global_batch: { key: "gb", start: 16 }, terms: { key: "pt", start: "on-demand" },
    every_method: { key: "am", start: false },
  };
  const QUESTIONS = Object.keys(QUESTION);
  const isA = (name, kind) => OPTIONS[name].kind === kind;
  const CARDS = ["RTX-4090", "RTX-A6000", "H100-SXM", "H200"];

  /** The configuration that the page opens with; null leaves an option to its default, which for a flag is off. */
  function start() {
    const slugs = vramprobe.catalog.map((entry) => entry.slug);
    const options = Object.fromEntries(NAMES.map((name) => [name, null]));
    return {
      options: {
        ...options, model: slugs.includes("llama-3.1-8b") ? "llama-3.1-8b" : slugs[0] ?? PASTED, method: "qlora",
        batch_size: 1, seq_len: 2048,
      },
      cards: CARDS.filter((slug) => vramprobe.gpus.some((gpu) => gpu.slug === slug)),
      configText: "",
      question: Object.fromEntries(QUESTIONS.map((name) => [name, QUESTION[name].start])),
    };
  }

  /** The hash without its `#`; empty for the start. `isWhole` is false where a pasted config is too long for a link. */
  function encode(now) {
    const first = start(), parts = [];
    for (const name of NAMES) {
      const value = now.options[name];
      if (value === first.options[name]) continue;
      parts.push(`${OPTIONS[name].key}=${value === null ? "" : value === true ? 1 : readable(String(value))}`);
    }
    if (now.cards.join() !== first.cards.join()) parts.push(`g=${now.cards.map(readable).join(",")}`);
    for (const name of QUESTIONS) {
      const { key, start: usual } = QUESTION[name], value = now.question[name];
      if (Object.is(value, usual)) continue;
      parts.push(`${key}=${value === null ? "" : typeof value === "boolean" ? Number(value) : readable(String(value))}`);
    }
    let isWhole = true;
    if (now.options.model === PASTED && now.configText.trim()) {
      const packed = pack(now.configText);
      isWhole = packed.length <= MAX_CONFIG_CHARACTERS;
      if (isWhole) parts.push(`c=${packed}`);
    }
    return { hash: parts.join("&"), isWhole };
  }

  /** {state, problems}: what is not understood is left at its start and named. */
  function decode(hash) {
    const found = start(), problems = [];
    const names = Object.fromEntries(NAMES.map((name) => [OPTIONS[name].key, name]));
    const questions = Object.fromEntries(QUESTIONS.map((name) => [QUESTION[name].key, name]));
    for (const part of hash.split("&").filter(Boolean)) {
      const at = part.indexOf("=");
      const key = at < 0 ? part : part.slice(0, at);
      try {
        const value = decodeURIComponent(at < 0 ? "" : part.slice(at + 1));
        if (key === "g") found.cards = knownCards(value, problems);
        else if (key === "c") found.configText = unpack(value);
        else if (questions[key] && at >= 0) found.question[questions[key]] = answered(questions[key], value);
        else if (names[key] && at >= 0) found.options[names[key]] = parsed(names[key], value);
        else problems.push(`the link has an unknown part ${JSON.stringify(part)}; known: ${[...Object.keys(names), ...Object.keys(questions), "g", "c"].join(", ")}`);
      } catch {
        problems.push(`the part ${JSON.stringify(key)} of the link is damaged and was left out`);
      }
    }
    if (found.options.model !== PASTED && !vramprobe.catalog.some((entry) => entry.slug === found.options.model)) {
      problems.push(`the model ${JSON.stringify(found.options.model)} of the link is not in this page's catalog`);
      found.options.model = start().options.model;
    }
    return { state: found, problems };
  }

  /** Throws where the form could not show the value: a number's field or the methods' would silently be empty. */
  function parsed(name, value) {
    const isDamaged = {
      flag: !["0", "1"].includes(value), method: !vramprobe.choices.method.includes(value), number: !Number.isFinite(Number(value)),
    };
    const { kind } = OPTIONS[name];
    if (isDamaged[kind]) throw new Error(value);
    if (kind === "flag") return value === "1" || null;
    if (value === "") return null;
    return kind === "number" ? Number(value) : value;
  }

  function answered(name, value) {
    const { start: usual } = QUESTION[name];
    const isDamaged = typeof usual === "boolean" ? !["0", "1"].includes(value)
      : typeof usual === "string" ? !vramprobe.terms.includes(value) : !Number.isFinite(Number(value));
    if (isDamaged) throw new Error(value);
    if (typeof usual === "boolean") return value === "1";
    return typeof usual === "string" ? value : value === "" ? null : Number(value);
  }

  function knownCards(value, problems) {
    const asked = [...new Set(value.split(",").filter(Boolean))];
    const known = asked.filter((slug) => vramprobe.gpus.some((gpu) => gpu.slug === slug));
    const unknown = asked.filter((slug) => !known.includes(slug));
    if (unknown.length) problems.push(`GPUs of the link that are not in this page's catalog: ${unknown.join(", ")}`);
    return known;
  }

  /** Percent-encoded, but for what a hash may hold and a person can read. */
  const readable = (text) => encodeURIComponent(text).replaceAll("%2C", ",").replaceAll("%2F", "/");

  /** A config as base64url, without its spaces where it is JSON. */
  function pack(text) {
    let small = text;
    try { small = JSON.stringify(JSON.parse(text)); } catch { /* what is no JSON is kept as it was typed */ }
    const binary = Array.from(new TextEncoder().encode(small), (byte) => String.fromCharCode(byte)).join("");
    return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
  }

  function unpack(packed) {
    const binary = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
    const text = new TextDecoder("utf-8", { fatal: true }).decode(Uint8Array.from(binary, (one) => one.charCodeAt(0)));
    try { return JSON.stringify(JSON.parse(text), null, 1); } catch { return text; }
  }

  return { PASTED, OPTIONS, NAMES, QUESTIONS, isA, start, encode, decode };
})();
