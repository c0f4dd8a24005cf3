// What the user has chosen ⇄ the URL's hash, with short keys and only what differs from the start.
// In: text of a link. Out: a state, and what of the link could not be understood. Checks names, not combinations.
const state = (() => {
  const SHORT = { model: "m", method: "t", batch_size: "b", seq_len: "s", gradient_checkpointing: "gc" };
  const CARDS = ["RTX-4090", "RTX-A6000", "A100-80GB-SXM", "H100-SXM"], MODEL = "llama-3.1-8b";
  const names = () => ["model", ...Object.keys(vramprobe.axes), "batch_size", "seq_len"];
  const keyOf = (name) => SHORT[name] ?? name, readable = (text) => encodeURIComponent(text).replaceAll("%2C", ",").replaceAll("%2F", "/");
  const isCount = (value) => Number.isInteger(value) && value >= 1;

  /** {cell, cards} that the page opens with: a usual model if it is recorded, and the commonest options of the book. */
  function start() {
    const models = vramprobe.models(), model = models.has(MODEL) || !models.size ? MODEL : [...models][0];
    return { cell: { model, ...vramprobe.options()[0], batch_size: 2, seq_len: 2048 }, cards: CARDS.filter((slug) => vramprobe.gpus.some((gpu) => gpu.slug === slug)) };
  }

  /** The hash without its `#`; empty for the start. */
  function encode({ cell, cards }) {
    const first = start();
    const parts = names().filter((name) => cell[name] !== first.cell[name]).map((name) => `${keyOf(name)}=${readable(String(cell[name]))}`);
    return [...parts, ...(cards.join() === first.cards.join() ? [] : [`g=${cards.map(readable).join(",")}`])].join("&");
  }

  /** {state, problems}: what is not understood is left at its start and named. */
  function decode(hash) {
    const found = start(), problems = [];
    for (const part of hash.split("&").filter(Boolean)) {
      const [key, ...rest] = part.split("="), name = names().find((one) => keyOf(one) === key);
      try {
        const value = decodeURIComponent(rest.join("="));
        if (key === "g") found.cards = known(value, problems);
        else if (name) found.cell[name] = parsed(name, value);
        else problems.push(`the link has an unknown part ${JSON.stringify(part)}; known: ${[...names().map(keyOf), "g"].join(", ")}`);
      } catch {
        problems.push(`the part ${JSON.stringify(key)} of the link is damaged and was left out`);
      }
    }
    return { state: found, problems };
  }

  /** Throws for what the form could not show. */
  function parsed(name, value) {
    const found = ["batch_size", "seq_len"].includes(name) ? Number(value) : vramprobe.axes[name]?.find((one) => String(one) === value);
    if (name === "model" ? !vramprobe.catalog.some(({ slug }) => slug === value) : found === undefined || (typeof found === "number" && !isCount(found))) {
      throw new Error(value);
    }
    return name === "model" ? value : found;
  }

  function known(value, problems) {
    const asked = [...new Set(value.split(",").filter(Boolean))], there = asked.filter((slug) => vramprobe.gpus.some((gpu) => gpu.slug === slug));
    if (there.length < asked.length) problems.push(`GPUs of the link that are not in this page's catalog: ${asked.filter((slug) => !there.includes(slug)).join(", ")}`);
    return there;
  }

  return { names, isCount, start, encode, decode };
})();
