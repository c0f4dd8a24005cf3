"""GRPO by TRL beside a vLLM engine on one GPU: who holds what in each stage, and what fits.

In: a cell's words, TRL's options, a GPU. Out: a Grpo. The trainer is predict/trainer_account.py's, the engine
predict/serve.py's. Predicted, allocated memory; no torch.
"""

from typing import Any, Literal, NamedTuple

from vramprobe.catalog import gpu_or_size
from vramprobe.errors import SpecError
from vramprobe.predict.bisection import bisected
from vramprobe.predict.questions import cell
from vramprobe.predict.serve import GRAPHS, Served, serve
from vramprobe.predict.trainer_account import RecordedTrainer, TrainerAccount, recorded_trainer
from vramprobe.predict.verdict import TIGHT_SHARE, set_aside, usable_bytes
from vramprobe.recipe.recorder import Say
from vramprobe.records.frozen import FrozenModel
from vramprobe.spec import CellSpec

TRAINER = "TRL 1.16 with vLLM in its process"
_ENGINE_TOKENS = 4096  # trl/generation/vllm_generation.py: max_num_batched_tokens
_LONGEST, _MOST_GENERATIONS = 1 << 20, 1 << 14


#: may fit: only because of what is left out.
GrpoVerdict = Literal["fits", "tight", "may fit", "does not fit"]


class GrpoStage(FrozenModel):
    """Bytes that both hold at the fullest moment of one stage of a step."""

    name: str
    trainer_bytes: int
    engine_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both accounts together."""
        return self.trainer_bytes + self.engine_bytes


class Grpo(FrozenModel):
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
    verdict: GrpoVerdict
    reason: str
    largest_completion_length: int | None = None
    largest_num_generations: int | None = None
    largest_gpu_memory_utilization: float | None = None
    not_searched: str = ""  # why neither the longest completion nor the largest group was looked for
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

    @property
    def length(self) -> int:
        return self.max_prompt_length + self.max_completion_length


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
    say: Say = lambda words: None,
    **options: Any,
) -> Grpo:
    """Predict a GRPO step on ``gpu``, one group of completions per micro-batch; defaults are TRL's but the prompt's.

    ``options``: the cell's words. ``searches``: also look for the largest length, group and utilization. ``say`` hears
    of a recording's progress. Raises SpecError for values that TRL or vLLM refuse, UnsupportedArchitecture for models
    that the engine's formulas do not know, and as predict/recorded.py's predict does.
    """
    group = (num_generations, max_prompt_length, max_completion_length)
    asked = _GrpoOptions(gpu, options, *group, beta, sleep, gpu_memory_utilization, vllm_release)
    _check(asked)
    spec = _cell(asked)
    _engine(asked, spec)  # which may be refused: before anything is recorded
    trainer = recorded_trainer(spec, gpu_or_size(gpu), say)
    found = _predicted(asked, spec, trainer)
    if not searches:
        return found

    def fits(**change: Any) -> bool:
        return _predicted(asked._replace(**change), spec, trainer).verdict != "does not fit"

    # a small share may fail, too: it does not hold one request
    hundredths = next((share for share in range(100, 0, -1) if fits(gpu_memory_utilization=share / 100)), None)
    largest: dict[str, Any] = {"largest_gpu_memory_utilization": None if hundredths is None else hundredths / 100}
    if trainer.why_one_shape:
        return found.model_copy(update=largest | {"not_searched": trainer.why_one_shape})
    longest = min(_LONGEST, (spec.learned_positions or 2 * _LONGEST) - max_prompt_length)
    largest["largest_completion_length"] = bisected(lambda value: fits(max_completion_length=value), longest, least=1)
    largest["largest_num_generations"] = bisected(lambda value: fits(num_generations=value), _MOST_GENERATIONS, least=2)
    return found.model_copy(update=largest)


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
    for name in ("loop", "trainer"):
        if asked.words.get(name):
            raise SpecError(f"{name}: GRPO has TRL's own; drop {name}")
    if asked.words.get("num_gpus", 1) != 1 or asked.words.get("sharding"):
        raise SpecError("GRPO beside vLLM is predicted on one GPU; drop sharding and num_gpus")


def _cell(asked: _GrpoOptions) -> CellSpec:
    """The trainer's cell, of one group, as TRL 1.16 has it (trl/trainer): under bf16 autocast, where no other precision
    is given; adapters of a 4-bit model in bf16, its rest as loaded.
    """
    own: dict[str, Any] = {"device": "cuda"} | ({} if asked.words.get("dtype") else {"autocast": "bf16"})
    if asked.words.get("method") == "qlora":
        own |= {"kbit_prep": "none", "lora_dtype": "bf16"}
    return cell(**own | asked.words, trainer="grpo", batch_size=asked.num_generations, seq_len=asked.length)


def _engine(asked: _GrpoOptions, spec: CellSpec) -> Served:
    return serve(
        model=spec.model,
        gpu=asked.gpu,
        max_model_len=asked.length,
        max_num_batched_tokens=_ENGINE_TOKENS,
        max_num_seqs=asked.num_generations,
        gpu_memory_utilization=asked.gpu_memory_utilization,
        quantization="bitsandbytes" if spec.method == "qlora" else "none",
        vllm_release=asked.vllm_release,
        finds_caches=asked.vllm_release == "0.19",  # as the emulated runs; no first start of these was compared
    )


def _predicted(asked: _GrpoOptions, spec: CellSpec, trainer: RecordedTrainer) -> Grpo:
    card, engine = gpu_or_size(asked.gpu), _engine(asked, spec)
    account = trainer.at(asked.num_generations, asked.length)
    reference = account.weights if asked.beta and spec.method == "full" else 0
    stages = _stages(asked, account, engine, reference, card.blas_workspace_bytes)
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
        weights_bytes=account.weights,
        reference_bytes=reference,
        optimizer_state_bytes=account.optimizer_state,
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
            f"the trainer's step: {account.provenance}",
            f"the engine is counted by the formulas of {engine.engine}",
            "allocated memory: what the allocator caches comes on top (up to 3.5 GiB in emulated runs)",
            *(f"not counted: {one}: the engine's cache is smaller" for one in engine.left_out),
            *engine.notes,
        ),
    )


def _stages(
    asked: _GrpoOptions, account: TrainerAccount, engine: Served, reference: int, workspace: int
) -> tuple[GrpoStage, ...]:
    """The stages of a step in TRL's order, after the load: vLLM takes its share while there is no optimizer state."""
    tables = max(engine.buffer_bytes - workspace, 0)  # cuBLAS's workspace is the trainer's, too
    awake = engine.weights_bytes + tables + max(engine.kv_cache_bytes, 0)
    by_name = {
        "load": (account.loaded, max(engine.requested_bytes, engine.weights_bytes)),
        "weight_sync": (account.idle + account.merging, engine.weights_bytes if asked.sleep else awake),
        "generation": (account.idle, awake),
        **{name: (size, 0 if asked.sleep else awake) for name, size in account.by_stage.items()},
    }
    return tuple(
        GrpoStage(name=name, trainer_bytes=trainer + reference, engine_bytes=engine_bytes)
        for name, (trainer, engine_bytes) in by_name.items()
    )


def _verdict(engine: Served, peak: GrpoStage, usable: int, aside: str) -> tuple[GrpoVerdict, str]:
    if engine.verdict == "does not fit":
        return "does not fit", "vLLM refuses to start: its share of the GPU does not hold one request's KV cache"
    share = f"{peak.name} holds the most, {aside}"
    if peak.total_bytes > usable:
        return "does not fit", share
    if parts := [one for one in engine.left_out if one != GRAPHS]:  # the engine's share stays, its cache is smaller
        return "may fit", f"{share}; not counted, so that vLLM may refuse to start: {'; '.join(parts)}"
    return ("fits" if peak.total_bytes <= TIGHT_SHARE * usable else "tight"), share
