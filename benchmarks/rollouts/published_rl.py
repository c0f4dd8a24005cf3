"""Hold arithmetic against published memory figures of GRPO and RLHF runs.

Needs nothing but this package; takes a second:

    python benchmarks/rollouts/published_rl.py            # rebuilds published_rl.md
    python benchmarks/rollouts/published_rl.py --check    # fails if it is stale
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_markdown, filled, read_csv, write_or_check
from vramprobe.architecture import Architecture, architecture
from vramprobe.catalog import find_gpu, find_model
from vramprobe.kernels.chip import chip_like
from vramprobe.predict.questions import cell
from vramprobe.predict.serve import serve
from vramprobe.terms import Moment, moments
from vramprobe.units import GIB

HERE = Path(__file__).parent
PAGE = HERE / "published_rl.md"
GPU, MODEL = "RTX-4090", "qwen2.5-1.5b"  # Qwen2.5-Math-1.5B has its shapes
AFTER_INIT, RESIDENT = "1", "5"  # rows of the loop: what is resident after init, and after a step
CLOSE = 0.02  # a figure is repeated if arithmetic is within 2 % of it
#: Bytes per logit in the loop's code (utils/grpo.py). Scoring, no gradients: bf16 logits, autocast's fp32 copy,
#: log_softmax. Training, in compute_entropy: bf16 logits, log_softmax kept for backward, and three of fp32.
SCORED, TRAINED = 2 + 4 + 4, 2 + 4 + 3 * 4
SCORED_BATCH, ACCUMULATED = 2, 16  # old_log_probs_train_size, gradient_accumulation_steps


def shapes(model: str) -> Architecture:
    """A model of the catalog's."""
    return architecture(find_model(model).config)


class Run(NamedTuple):
    """One step of one of the loop's logs: GiB before and at the peak of the scoring pass, then at the training peak."""

    log: str
    step: str
    resident: float
    scoring_peak: float
    training_peak: float

    @property
    def length(self) -> int:
        """Tokens of the padded sequences, by the scoring pass: its peak is logits alone."""
        logits = (self.scoring_peak - self.resident) * GIB
        return round(logits / (SCORED_BATCH * SCORED * shapes(MODEL).vocab_size))


#: Row of a training peak → its log and step in published_rl_steps.csv; "highest of 10 steps" is step 1 of each.
RUNS = {
    "3": ("plain", "0"),
    "6": ("checkpointing", "0"),
    "7": ("checkpointing", "1"),
    "9": ("sleep mode", "1"),
    "11": ("8-bit AdamW", "1"),
}
#: What a row must say for its arithmetic.
NEEDED = ("model", "method", "dtype", "optimizer", "gpu", "micro_batch_per_gpu", "max_prompt_len", "max_response_len")


def engine_bytes() -> int:
    """Weights and KV cache of the loop's vLLM, which torch counts: one process holds trainer and engine."""
    served = serve(
        model=MODEL,
        gpu=GPU,
        max_model_len=4096,  # Qwen2.5-Math's
        max_num_batched_tokens=8192,  # vLLM's defaults for LLM() on a GPU below 70 GiB
        max_num_seqs=256,
        gpu_memory_utilization=0.2,
    )
    return served.weights_bytes + served.kv_cache_bytes


def steps() -> dict[tuple[str, str], Run]:
    """(log, step) → what the loop's logs say of it."""
    found = read_csv(HERE / "published_rl_steps.csv")
    runs = [Run(row["log"], row["step"], *(float(row[f"{name}_gib"]) for name in Run._fields[2:])) for row in found]
    return {(run.log, run.step): run for run in runs}


def resident_bytes() -> dict[str, int]:
    """The trainer's account between steps, by row: weights, then AdamW's state too."""
    terms = _moments(gradient_checkpointing=False, seq_len=1, optim="adamw_torch_fused")[-1].terms
    return {AFTER_INIT: terms["weights"], RESIDENT: terms["weights"] + terms["optimizer_state"]}


def peak_bytes(run: Run) -> int:
    """The trainer's account at the peak of a step; the first has no optimizer state before its end."""
    eight_bit, first_step = run.log == "8-bit AdamW", run.step == "0"
    optim = "adamw_bnb_8bit" if eight_bit else "adamw_torch_fused"
    found = _moments(gradient_checkpointing=run.log != "plain", seq_len=run.length, optim=optim)
    state = found[-1].terms["optimizer_state"]
    if eight_bit:
        # two moments of a byte, an fp32 scale for each 256: bitsandbytes' own class does so for the embedding too
        state = 2 * shapes(MODEL).num_params * (256 + 4) // 256
    peaks = []
    for one in found:
        size = one.total_bytes - one.terms["optimizer_state"]
        if one.label == "loss":
            size += TRAINED * run.length * shapes(MODEL).vocab_size - one.terms["logits"]
        peaks.append(size if first_step and one.phase != "optimizer_step" else size + state)
    return max(peaks)


def _moments(**more: Any) -> tuple[Moment, ...]:
    words = {"method": "full", "dtype": "bf16", "autocast": "bf16", "attn": "flash_attention_2"}
    spec = cell(device="cuda", model=MODEL, batch_size=1, grad_accum=ACCUMULATED, **words, **more)
    return tuple(moments(spec, chip_like(find_gpu(GPU))))


def _compared(published: float, predicted: float) -> list[str]:
    difference = predicted - published
    return [f"{published:.2f}", f"{predicted:.2f}", f"{difference:+.2f}", f"{100 * difference / published:+.1f} %"]


def loop_table(rows: dict[str, dict[str, str]]) -> list[str]:
    """The loop's rows: the whole figure, then the trainer's part above what is resident after init."""
    base, engine, resident = float(rows[AFTER_INIT]["memory"]), engine_bytes(), resident_bytes()
    runs = {row: steps()[where] for row, where in RUNS.items()}
    accounts = resident | {row: peak_bytes(run) for row, run in runs.items()}
    lines = []
    for row in sorted(accounts, key=int):
        published = float(rows[row]["memory"])
        whole = _compared(published, (accounts[row] + engine) / GIB)
        part, verdict = ["-"] * 4, "conditions missing: vLLM's release"
        if row != AFTER_INIT:
            above = (accounts[row] - resident[AFTER_INIT]) / GIB
            part, verdict = _compared(published - base, above), f"trainer {_verdict(published - base, above)}"
        tokens = f"{runs[row].length:,}" if row in runs else "-"
        lines.append([row, rows[row]["phase"], tokens, *whole, *part, verdict])
    columns = ["published", "arithmetic", "GiB", "%"]
    head = ["row", "figure", "tokens", *columns, *(f"trainer: {name}" for name in columns), "verdict"]
    return as_markdown(head, "llr" + "r" * 8 + "l", lines)


def _verdict(published: float, predicted: float) -> str:
    return "repeated" if abs(predicted / published - 1) <= CLOSE else "not repeated"


def steps_table(base: float) -> list[str]:
    """All steps of each log: the trainer's part of the peaks, their lengths, and how far arithmetic is off."""
    weights, logs = resident_bytes()[AFTER_INIT], {}
    for run in steps().values():
        published, predicted = run.training_peak - base, (peak_bytes(run) - weights) / GIB
        logs.setdefault(run.log, []).append((run.length, predicted - published, 100 * (predicted / published - 1)))
    lines = []
    for log, found in logs.items():
        lengths, gaps, errors = zip(*found, strict=True)
        spread = f"{min(gaps):+.2f} to {max(gaps):+.2f}"
        close = sum(abs(error) <= 100 * CLOSE for error in errors)
        worst = f"{max(errors, key=abs):+.1f} %"
        lines.append([log, len(found), f"{min(lengths):,} to {max(lengths):,}", spread, worst, close])
    head = ["log", "steps", "tokens", "difference, GiB", "worst", "repeated"]
    return as_markdown(head, "lrrrrr", lines)


def other_table() -> list[str]:
    """Figures of tensors and claims, each from its own shapes."""
    llama, qwen = shapes("llama-3.1-8b"), shapes("qwen3-0.6b")
    one_cache = 2 * 2 * llama.num_layers * 8 * 128  # bf16 keys and values of 8 heads of 128
    prefill = 2 * (qwen.num_params + 4 * 512 * (qwen.vocab_size + 2 * qwen.num_layers * 8 * 128))
    cases = [
        (
            "72",
            "log-probabilities of 16 × 1024 × 32768 logits, one row at a time, MB",
            2282,
            (16 + 1) * 1024 * 32768 * 4 / 1e6,
            "",
            "fp32 logits and one row of logsumexp's",
        ),
        (
            "73",
            "prefill of 4 × 512, all logits",
            2.50,
            prefill / GIB,
            "",
            "weights, KV cache, bf16 logits; unexplained: one more bf16 copy of the logits is 0.58",
        ),
        (
            "66",
            "claim: GRPO logits, 8 × 20K",
            78.3,
            8 * 20480 * llama.vocab_size * 4 / GIB,
            "",
            "4 bytes per logit, 20,480 tokens; printed as GB, it is GiB",
        ),
        (
            "66",
            "claim: KV cache, 20K",
            2.5,
            8 * 20480 * one_cache / GIB,
            "refuted",
            "the claim is the KV cache of one sequence; a group of 8 in flight needs eight times that",
        ),
    ]
    lines = [
        [row, what, *_compared(published, said), verdict or _verdict(published, said), why]
        for row, what, published, said, verdict, why in cases
    ]
    head = ["row", "figure", "published", "arithmetic", "difference", "%", "verdict", "what it consists of"]
    return as_markdown(head, "llrrrrll", lines)


def missing_table(rows: dict[str, dict[str, str]]) -> list[str]:
    """The rows whose sources do not say enough."""
    lines = []
    for row, told in rows.items():
        if row in RUNS or row in (AFTER_INIT, RESIDENT, "66", "72", "73"):
            continue
        gaps = [name for name in NEEDED if not told[name] or "not stated" in told[name] or "not in " in told[name]]
        lines.append([row, told["framework"], told["memory"], told["unit"], ", ".join(gaps)])
    return as_markdown(["row", "framework", "published", "unit", "not said"], "llrll", lines)


def page() -> str:
    """published_rl.md."""
    rows = {row["row"]: row for row in read_csv(HERE / "published_rl.csv")}
    base = float(rows[AFTER_INIT]["memory"])
    return filled(
        PAGE, loop=loop_table(rows), steps=steps_table(base), others=other_table(), missing=missing_table(rows)
    )


if __name__ == "__main__":
    write_or_check({PAGE: page()}, "rollouts/published_rl.py", check="--check" in sys.argv)
