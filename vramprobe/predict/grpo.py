"""GRPO by TRL beside a vLLM engine on one GPU, by arithmetic: who holds what in each stage, and what fits.

In: a cell's words, TRL's options, a GPU. Out: a Grpo. The trainer's layers are the cell's own (terms/); head and loss
are TRL 1.16's chunked log-probabilities; the engine is predict/serve.py's. Predicted, allocated memory; no torch.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from vramprobe.architecture import architecture
from vramprobe.bounds.tensors import quantised_bytes, tensors
from vramprobe.catalog import gpu_or_size
from vramprobe.errors import SpecError
from vramprobe.kernels.chip import chip_like
from vramprobe.predict.bisection import bisected
from vramprobe.predict.prediction import Frozen
from vramprobe.predict.questions import cell
from vramprobe.predict.serve import GRAPHS, Served, serve
from vramprobe.predict.verdict import TIGHT_SHARE, set_aside, usable_bytes
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment, moments
from vramprobe.terms.cell.setup import TOKENS
from vramprobe.terms.models.chunked_nll import WORDS

TRAINER = "TRL 1.16 with vLLM in its process"
_ENGINE_TOKENS = 4096  # trl/generation/vllm_generation.py: max_num_batched_tokens
_LONGEST = 1 << 20


class GrpoStage(Frozen):
    """Bytes that both hold at the fullest moment of one stage of a step."""

    name: str
    trainer_bytes: int
    engine_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both accounts together."""
        return self.trainer_bytes + self.engine_bytes


class Grpo(Frozen):
    """A step of GRPO on one GPU; ``largest_*``: all else as given; null: not even the least fits."""

    trainer: str = TRAINER
    model: str
    gpu: str
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    sleep: bool
    gpu_memory_utilization: float
    weights_bytes: int
    reference_bytes: int
    optimizer_state_bytes: int
    engine_weights_bytes: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    stages: tuple[GrpoStage, ...]
    peak_stage: str
    peak_bytes: int
    usable_bytes: int
    verdict: Literal["fits", "tight", "may fit", "does not fit"]  # may fit: only because of what is left out
    reason: str
    largest_completion_length: int | None = None
    largest_num_generations: int | None = None
    largest_gpu_memory_utilization: float | None = None
    notes: tuple[str, ...] = ()


class _GrpoOptions(NamedTuple):
    gpu: str
    words: dict[str, Any]  # of the cell, without batch and length
    num_generations: int
    max_prompt_length: int
    max_completion_length: int
    beta: float
    sleep: bool
    gpu_memory_utilization: float
    vllm_release: str


def grpo(
    *,
    gpu: str,
    num_generations: int = 8,
    max_prompt_length: int = 512,
    max_completion_length: int = 256,
    beta: float = 0.0,
    sleep: bool = False,
    gpu_memory_utilization: float = 0.3,
    vllm_release: str = "0.32",
    searches: bool = True,
    **options: Any,
) -> Grpo:
    """Predict a GRPO step on ``gpu``, one group of completions per micro-batch; defaults are TRL's but the prompt's.

    ``options``: the cell's words. ``searches``: also look for the largest length, group and utilization. Raises
    SpecError for values that TRL or vLLM refuse, UnsupportedArchitecture for models without arithmetic.
    """
    asked = _GrpoOptions(
        gpu,
        options,
        num_generations,
        max_prompt_length,
        max_completion_length,
        beta,
        sleep,
        gpu_memory_utilization,
        vllm_release,
    )
    _check(asked)
    found = _predicted(asked)
    if not searches:
        return found

    def fits(**change: Any) -> bool:
        return _predicted(asked._replace(**change)).verdict != "does not fit"

    # a small share may fail, too: it does not hold one request
    hundredths = next((share for share in range(100, 0, -1) if fits(gpu_memory_utilization=share / 100)), None)
    return found.model_copy(
        update={
            "largest_completion_length": bisected(lambda value: fits(max_completion_length=value), _LONGEST, least=1),
            "largest_num_generations": bisected(lambda value: fits(num_generations=value), 1 << 14, least=2),
            "largest_gpu_memory_utilization": None if hundredths is None else hundredths / 100,
        }
    )


def _check(asked: _GrpoOptions) -> None:
    for name, least in (("num_generations", 2), ("max_prompt_length", 1), ("max_completion_length", 1)):
        if getattr(asked, name) < least:
            raise SpecError(f"{name} {getattr(asked, name)}: a whole number of {least} or more")
    if asked.beta < 0:
        raise SpecError(f"beta {asked.beta}: 0 (no reference model) or more")
    for name in ("batch_size", "seq_len"):
        if name in asked.words:
            raise SpecError(
                f"{name}: the trainer's batch is one group (num_generations), its length that of prompt and completion "
                f"(max_prompt_length, max_completion_length); drop {name}"
            )
    if asked.words.get("method") == "qlora" and asked.vllm_release == "0.32":
        raise SpecError(
            "method qlora: TRL asks the engine for bitsandbytes as well, which vLLM 0.32 no longer has; choose "
            "vllm_release 0.19, or method lora"
        )
    if asked.words.get("loop"):
        raise SpecError("loop: GRPO has TRL's own; drop loop")
    if asked.words.get("num_gpus", 1) != 1 or asked.words.get("sharding"):
        raise SpecError("GRPO beside vLLM is predicted on one GPU; drop sharding and num_gpus")


def _trls_own(asked: _GrpoOptions) -> dict[str, Any]:
    """Return TRL 1.16's preparation of a 4-bit model (trl/trainer/grpo_trainer.py): adapters in bf16, the rest as
    loaded.
    """
    return {"kbit_prep": "none", "lora_dtype": "bf16"} if asked.words.get("method") == "qlora" else {}


def _predicted(asked: _GrpoOptions) -> Grpo:
    card = gpu_or_size(asked.gpu)
    length = asked.max_prompt_length + asked.max_completion_length
    spec = cell(**{"device": "cuda"} | _trls_own(asked) | asked.words, batch_size=asked.num_generations, seq_len=length)
    engine = serve(
        model=spec.model,
        gpu=asked.gpu,
        max_model_len=length,
        max_num_batched_tokens=_ENGINE_TOKENS,
        max_num_seqs=asked.num_generations,
        gpu_memory_utilization=asked.gpu_memory_utilization,
        quantization="bitsandbytes" if spec.method == "qlora" else "none",
        vllm_release=asked.vllm_release,
        finds_caches=asked.vllm_release == "0.19",  # as the emulated runs; no first start of these was compared
    )
    found = moments(spec, chip_like(card))
    optimizer = found[-1].terms
    reference = optimizer["weights"] if asked.beta and spec.method == "full" else 0
    stages = _stages(asked, spec, found, engine, reference, card.blas_workspace_bytes)
    peak = max(stages, key=lambda one: one.total_bytes)
    usable = usable_bytes(card, device_is_known=False)
    answer, reason = _verdict(engine, peak, usable, set_aside(card))
    return Grpo(
        model=spec.model_label,
        gpu=engine.gpu,
        num_generations=asked.num_generations,
        max_prompt_length=asked.max_prompt_length,
        max_completion_length=asked.max_completion_length,
        sleep=asked.sleep,
        gpu_memory_utilization=asked.gpu_memory_utilization,
        weights_bytes=optimizer["weights"],
        reference_bytes=reference,
        optimizer_state_bytes=optimizer.get("optimizer_state", 0),
        engine_weights_bytes=engine.weights_bytes,
        kv_cache_bytes=max(engine.kv_cache_bytes, 0),
        kv_cache_tokens=engine.kv_cache_tokens,
        stages=stages,
        peak_stage=peak.name,
        peak_bytes=peak.total_bytes,
        usable_bytes=usable,
        verdict=answer,
        reason=reason,
        notes=(
            f"the engine is counted by the formulas of {engine.engine}",
            "allocated memory: what the allocator caches comes on top (up to 3.5 GiB in emulated runs)",
            *(f"not counted: {one}: the engine's cache is smaller" for one in engine.left_out),
            *engine.notes,
        ),
    )


def _stages(
    asked: _GrpoOptions, spec: CellSpec, found: list[Moment], engine: Served, reference: int, workspace: int
) -> tuple[GrpoStage, ...]:
    """The stages of a step in TRL's order, after the load: vLLM takes its share while there is no optimizer state."""
    optimizer = found[-1].terms
    weights = optimizer["weights"] + reference + workspace
    idle = weights + optimizer.get("optimizer_state", 0)
    cache = max(engine.kv_cache_bytes, 0)
    tables = max(engine.buffer_bytes - workspace, 0)  # cuBLAS's workspace is the trainer's, too
    awake = engine.weights_bytes + tables + cache
    held = 0 if asked.sleep else awake  # while the trainer works
    tile, last_hidden = _tile_bytes(spec, asked)
    merging = _merging_bytes(spec)
    first = next(at.label for at in found if at.label.endswith("layer"))  # of one layer: the last
    alone = max(moment.terms.get("temporaries", 0) for moment in found if moment.label == first)
    hidden = 2 * spec.num_tokens * architecture(spec.architecture).head_width
    log_probs = idle + max(alone + 2 * hidden, tile + hidden + last_hidden)
    trained = {"forward": 0, "backward": 0}
    for moment in found:
        if moment.phase not in trained:
            continue
        size = moment.total_bytes + reference + workspace
        if moment.label == "loss":
            size += tile + last_hidden - moment.terms.get("logits", 0)
            if moment.phase == "backward":
                size += 2 * last_hidden + _head_gradient(spec)
        trained[moment.phase] = max(trained[moment.phase], size)
    return (
        GrpoStage(name="load", trainer_bytes=weights, engine_bytes=max(engine.requested_bytes, engine.weights_bytes)),
        GrpoStage(
            name="weight_sync",
            trainer_bytes=idle + merging,
            engine_bytes=engine.weights_bytes if asked.sleep else awake,
        ),
        GrpoStage(name="generation", trainer_bytes=idle, engine_bytes=awake),
        GrpoStage(name="log_probs", trainer_bytes=log_probs, engine_bytes=held),
        GrpoStage(name="forward", trainer_bytes=trained["forward"], engine_bytes=held),
        GrpoStage(name="backward", trainer_bytes=trained["backward"], engine_bytes=held),
        GrpoStage(
            name="optimizer_step", trainer_bytes=sum(optimizer.values()) + reference + workspace, engine_bytes=held
        ),
    )


def _merging_bytes(spec: CellSpec) -> int:
    """PEFT merges into one layer at a time, its delta and the sum in fp32 (peft/tuners/lora/layer.py:
    get_delta_weight). In 4 bits weight, delta and sum are bf16, and TRL's list of parameters keeps all that were merged
    before (peft/tuners/lora/bnb.py: merge, trl/distributed.py: gather_params)."""
    arch = architecture(spec.architecture)
    if spec.method == "full":
        return 0
    largest = max(one.numel for one in arch.parameters if one.role == "linear")
    if spec.method == "lora":
        return 2 * 4 * largest
    kept = sum(quantised_bytes(one, spec.quant) * one.num_copies for one in tensors(spec, arch) if one.quantised)
    return kept + 3 * 2 * largest


def _tile_bytes(spec: CellSpec, asked: _GrpoOptions) -> tuple[int, int]:
    """(TRL's tile of logits, the hidden states of the completions), in 16 bits; only completions are scored."""
    scored = asked.num_generations * asked.max_completion_length
    return 2 * min(scored, TOKENS) * WORDS, 2 * scored * architecture(spec.architecture).head_width


def _head_gradient(spec: CellSpec) -> int:
    """The head's gradient, summed in fp32 and then copied to 16 bits, where the head is trained."""
    arch = architecture(spec.architecture)
    return (4 + 2) * arch.vocab_size * arch.head_width if spec.method == "full" else 0


def _verdict(engine: Served, peak: GrpoStage, usable: int, aside: str) -> tuple[str, str]:
    if engine.verdict == "does not fit":
        return "does not fit", "vLLM refuses to start: its share of the GPU does not hold one request's KV cache"
    share = f"{peak.name} holds the most, {aside}"
    if peak.total_bytes > usable:
        return "does not fit", share
    if parts := [one for one in engine.left_out if one != GRAPHS]:  # the engine's share stays, its cache is smaller
        return "may fit", f"{share}; not counted, so that vLLM may refuse to start: {'; '.join(parts)}"
    return ("fits" if peak.total_bytes <= TIGHT_SHARE * usable else "tight"), share
