// A stand-in for the calculator's engine, for tests of the page around it: made-up memory, the real interface.
"use strict";

const vramprobe = (() => {
  const { catalog, gpus, choices } = JSON.parse(document.getElementById("engine-data").textContent);
  const GIB = 1024 ** 3;
  const DEFAULTS = { optim: "adamw_torch_fused", dtype: "bf16", attn: "sdpa", grad_accum: 1 };

  function resolve(options, config) {
    const isAdapter = options.method !== "full";
    const defaults = {
      ...DEFAULTS, autocast: isAdapter ? "bf16" : "none", quant: options.method === "qlora" ? "nf4" : "none",
      kbit_prep: options.method === "qlora" ? "peft" : "none",
      ...(isAdapter ? { lora_r: 16, lora_targets: "all-linear", lora_dropout: 0, lora_dtype: "fp32" } : {}),
    };
    const spec = Object.fromEntries(Object.entries(options).map(([name, value]) => [name, value ?? defaults[name] ?? null]));
    const errors = [];
    for (const name of ["batch_size", "seq_len", "grad_accum"]) {
      if (!Number.isInteger(spec[name]) || spec[name] < 1) errors.push({ option: name, message: "must be at least 1" });
    }
    for (const [name, allowed] of Object.entries(choices)) {
      if (name !== "lora_targets" && spec[name] && !allowed.includes(spec[name])) {
        errors.push({ option: name, message: `allowed: ${allowed.join(", ")}` });
      }
    }
    if (typeof config.model_type !== "string") errors.push({ option: "config", message: "must name its model_type" });
    if (spec.dtype === "fp16" && spec.autocast === "bf16") errors.push({ option: "autocast", message: "weights in fp16 under bf16 autocast mix two 16-bit formats" });
    return { spec: errors.length ? null : spec, errors };
  }

  function predict(spec, config) {
    if (["mixtral", "qwen3_moe"].includes(config.model_type)) throw new Error(`model type '${config.model_type}' cannot be predicted by this version`);
    const h = config.hidden_size ?? config.n_embd ?? 768, layers = config.num_hidden_layers ?? config.n_layer ?? 12;
    const n = layers * 12 * h * h + (config.vocab_size ?? 50000) * h, tokens = spec.batch_size * spec.seq_len;
    const trained = spec.method === "full" ? n : layers * 14 * h * (spec.lora_r ?? 16);
    const weights = spec.method === "qlora" ? 0.56 * n : 2 * n;
    const terms = [
      ["weights", weights], ["gradients", spec.method === "full" ? 2 * trained : 0], ["optimizer_state", 8 * trained], ["batch", 16 * tokens],
      ["saved_activations", spec.gradient_checkpointing ? 0 : 34 * layers * tokens * h],
      ["checkpoint_store", spec.gradient_checkpointing ? 2 * layers * tokens * h : 0],
      ["logits", 12 * tokens * (config.vocab_size ?? 50000)], ["cast_copies", spec.method === "full" ? 0 : 1e9], ["temporaries", 2e6],
    ].map(([name, size]) => [name, Math.round(size)]).filter(([, size]) => size > 0);
    const value = terms.reduce((sum, [, size]) => sum + size, 0);
    return {
      peak_allocated_bytes: { value, low: Math.round(0.95 * value), high: Math.round(1.1 * value) }, reserved_bytes: null,
      device_bytes: null, peak_phase: "backward", peak_place: "loss", terms, notes: ["arithmetic alone: no fit was given"],
    };
  }

  function verdict(prediction, gpu) {
    const needed = prediction.peak_allocated_bytes, usable = gpu.memory_bytes - GIB;
    const said = needed.value > usable ? "does not fit" : needed.high <= 0.95 * usable ? "fits" : "tight";
    return { verdict: said, tier: "allocated", needed, usable_bytes: usable };
  }

  function largest(spec, config, gpu) {
    const last = (name) => {
      let low = 0, high = 1 << 22;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (verdict(predict({ ...spec, [name]: middle }, config), gpu).verdict === "fits") low = middle; else high = middle;
      }
      return low || null;
    };
    return { batch_size: last("batch_size"), seq_len: last("seq_len") };
  }

  function command(spec) {
    const words = Object.entries(spec).filter(([name, value]) => value !== null && value !== false && !(name in DEFAULTS && DEFAULTS[name] === value))
      .map(([name, value]) => `--${name.replaceAll("_", "-")}${value === true ? "" : ` ${value}`}`);
    return `vramprobe measure ${words.join(" ")}`;
  }

  return { catalog, gpus, choices, resolve, predict, verdict, largest, command };
})();
