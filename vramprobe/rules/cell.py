"""The rules of a cell on one GPU: method, precision, device and architecture.

In: a cell. Out: a reason for each rule that it breaks.
"""

from vramprobe.optimizers import OPTIMIZERS
from vramprobe.options import ADAPTER_OPTIONS
from vramprobe.rules import Cell
from vramprobe.trainers import LOOPS, USUAL_LOOP
from vramprobe.units import format_bytes

#: What ``--lora-targets q_v`` means per model type: the LoRA paper's query and value projections, as peft maps them;
#: where a family fuses the projections, the fused one.
Q_V_TARGETS: dict[str, tuple[str, ...]] = {
    "gpt2": ("c_attn",),
    "gpt_neox": ("query_key_value",),
    "bloom": ("query_key_value",),
    "falcon": ("query_key_value",),
    "phi3": ("qkv_proj",),
    "t5": ("q", "v"),
    "deepseek_v2": ("q_proj", "kv_b_proj"),
    "deepseek_v3": ("q_b_proj", "kv_b_proj"),
    "glm4_moe_lite": ("q_b_proj", "kv_b_proj"),
}

#: Families that transformers gives no SDPA attention; it loads them eager by default, and so do we.
NO_SDPA = ("bloom", "gemma2", "gpt_oss")
#: Families that transformers gives no flash_attention_2.
_NO_FLASH = ("bloom", "gpt_oss", "llama4_text")
#: Families that Liger has no fused loss for; the rest of the catalog it has (0.8.5).
_NO_FUSED_LOSS = (
    "apertus", "arcee", "bloom", "cohere", "ernie4_5", "ernie4_5_moe", "falcon", "gemma3n_text", "glm",
    "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_neox", "granite", "granitemoehybrid", "helium", "internlm3", "lfm2",
    "lfm2_moe", "minimax_m2", "ministral3", "nemotron_h", "olmoe", "opt", "seed_oss", "t5",
)  # fmt: skip
#: Families that Cut Cross-Entropy's patch for transformers leaves out (Axolotl's fork, 5f0c7a7).
_NO_CUT = (
    "bloom", "ernie4_5", "ernie4_5_moe", "falcon", "falcon_h1", "gpt2", "gpt_neox", "helium", "internlm3", "opt", "t5",
)  # fmt: skip


def not_quantized(quant: str, kbit_prep: str, dtype: str, num_reached: int, num_params: int) -> list[str]:
    """Return a warning if a model's quantization reaches less than half of it, as of a mixture of experts; else
    nothing.
    """
    if quant == "none" or 2 * num_reached >= num_params:
        return []
    held = "fp32" if kbit_prep == "peft" else dtype
    num_bytes = (num_params - num_reached) * (4 if held == "fp32" else 2)
    said = (
        f"{quant} reaches only {num_reached:,} of {num_params:,} parameters: bitsandbytes takes linear layers alone, "
        f"neither embeddings nor experts in one tensor; the others take {format_bytes(num_bytes)} in {held}"
    )
    if held != dtype:
        said += ", to which PEFT's preparation raises them: half of that with --kbit-prep trl or none"
    return [f"{said}; Axolotl can quantize experts, too"]


def lora_target_names(spec: Cell) -> list[str] | None:
    """Module names the adapters go on; None means every linear layer but the output head (peft's ``all-linear``)."""
    match spec.lora_targets:
        case "all-linear":
            return None
        case "q_v":
            return list(Q_V_TARGETS.get(spec.model_type, ("q_proj", "v_proj")))
        case names:
            return list(names or ())


def reasons_against(spec: Cell) -> list[str]:
    """Return the reasons why this combination cannot run; empty when it can."""
    rules = (
        _method_rules(spec) + _loop_rules(spec) + _other_head_rules(spec) + _precision_rules(spec) + _device_rules(spec)
    )
    return [reason for broken, reason in rules if broken] + _architecture_reasons(spec)


def _method_rules(spec: Cell) -> list[tuple[bool, str]]:
    given = [getattr(spec, name, None) for name in ADAPTER_OPTIONS]
    has_adapters = any(value is not None and value is not False for value in given)
    return [
        (
            spec.method == "qlora" and spec.quant == "none",
            "method qlora trains adapters on a quantized base; set quant to nf4, nf4-single, fp4 or int8, or use lora",
        ),
        (
            spec.method != "qlora" and spec.quant != "none",
            f"quant {spec.quant} needs method qlora: quantized weights cannot be trained, only adapters on them",
        ),
        (
            spec.method != "qlora" and spec.kbit_prep != "none",
            f"kbit_prep {spec.kbit_prep} prepares a quantized model; it needs method qlora",
        ),
        (
            spec.method == "full" and has_adapters,
            "LoRA options (lora_*, dora) were given, but method full trains no adapters; use method lora or qlora",
        ),
        (
            spec.dora and spec.quant == "int8",
            "peft's DoRA cannot start from an int8 base; use quant nf4 or fp4, or plain LoRA",
        ),
        (spec.method != "full" and (spec.lora_r or 0) < 1, f"lora_r must be at least 1, {spec.lora_r} given"),
        (
            spec.fused_linear_cross_entropy and "lm_head" in (lora_target_names(spec) or ()),
            "fused_linear_cross_entropy reads the head's own weight and passes its adapter by; leave lm_head out of "
            "lora_targets",
        ),
        (
            spec.lora_dropout is not None and not 0 <= spec.lora_dropout < 1,
            f"lora_dropout must be in [0, 1), {spec.lora_dropout} given",
        ),
    ]


def _other_head_rules(spec: Cell) -> list[tuple[bool, str]]:
    what, is_run = spec.other_head, spec.other_head != ""
    return [
        (
            is_run and spec.fused_linear_cross_entropy,
            f"{what} and fused_linear_cross_entropy both replace the model's head and loss; use one of them",
        ),
        (spec.trainer != "sft" and spec.loss != "nll", f"{what} has a head and loss of its own; leave loss out"),
        (
            spec.trainer != "sft" and bool(spec.lora_dropout),
            f"{what}: TRL switches every dropout off; leave lora_dropout out",
        ),
        (
            (spec.fuses_head or spec.loss == "cut_cross_entropy") and "lm_head" in (lora_target_names(spec) or ()),
            f"{what} reads the head's own weight and passes its adapter by; leave lm_head out of lora_targets",
        ),
        (is_run and spec.model_type == "t5", f"{what} is of models that predict the next token; leave it out for t5"),
        (is_run and spec.torch_compile, f"{what} is not run compiled; leave torch_compile out"),
        (is_run and spec.padding, f"{what} leaves padded tokens out, which is not followed here; leave padding out"),
        (is_run and spec.device == "cpu", f"{what} is run on GPUs alone; it needs device cuda"),
        *_cut_rules(spec),
    ]


def _loop_rules(spec: Cell) -> list[tuple[bool, str]]:
    loop, is_other = LOOPS[spec.loop], spec.loop != USUAL_LOOP
    return [
        (
            is_other and spec.trainer != "sft",
            f"trainer {spec.trainer} has a loop of its own; leave loop {spec.loop} out",
        ),
        (is_other and spec.is_sharded, f"loop {spec.loop} is known without sharding; leave it or sharding out"),
        (
            loop.frees_gradients_late and spec.grad_accum > 1,
            f"loop {spec.loop} frees the gradients in each micro-step, and grad_accum {spec.grad_accum} adds them up; "
            "leave one of them out",
        ),
    ]


def _cut_rules(spec: Cell) -> list[tuple[bool, str]]:
    """Rules of Cut Cross-Entropy's kernels, and of the patch that puts them into a model."""
    what, cuts = spec.other_head, spec.loss == "cut_cross_entropy"
    return [
        (
            cuts and spec.dtype == "fp32",
            f"{what}: its kernels take a head of 16 bits; load in bf16, with autocast or without",
        ),
        (
            cuts and spec.kbit_prep == "peft",
            f"{what}: kbit_prep peft raises the head to fp32, which its kernels do not take; use kbit_prep none or trl",
        ),
        (cuts and spec.model_type in _NO_CUT, f"{what}: its library has no patch for {spec.model_type}; leave it out"),
    ]


def _precision_rules(spec: Cell) -> list[tuple[bool, str]]:
    trained = spec.dtype if spec.method == "full" else spec.lora_dtype
    return [
        (
            trained == "fp16" and spec.autocast == "fp16",
            "--autocast fp16 needs fp32 trained weights, as GradScaler refuses to unscale fp16 gradients: "
            + ("--dtype fp32" if spec.method == "full" else "--lora-dtype fp32"),
        ),
        (
            {spec.dtype, spec.autocast} == {"bf16", "fp16"},
            f"--dtype {spec.dtype} under --autocast {spec.autocast} mixes two 16-bit formats; leave --autocast out, or "
            f"take --autocast {spec.dtype}",
        ),
        (
            spec.kbit_prep == "trl" and spec.autocast != "bf16",
            "trl makes these casts only under bf16 autocast (its fp32 norms feed a bf16 head); set autocast bf16",
        ),
        (
            spec.kbit_prep == "trl" and spec.lora_dtype not in ("bf16", "fp32"),
            f"trl casts adapters to bf16, or leaves them fp32 (0.9 to 0.13); lora_dtype {spec.lora_dtype} was given",
        ),
        (
            spec.autocast == "none" and {spec.dtype, spec.lora_dtype} == {"bf16", "fp16"},
            f"{spec.lora_dtype} adapters on {spec.dtype} weights mix two 16-bit formats; use {spec.dtype} or fp32",
        ),
        (
            spec.attn == "flash_attention_2" and spec.dtype == "fp32" and spec.autocast == "none",
            "flash_attention_2 has no fp32 kernel; load in bf16 or fp16, or set autocast",
        ),
    ]


def _device_rules(spec: Cell) -> list[tuple[bool, str]]:
    return [
        (
            spec.device == "cpu" and OPTIMIZERS[spec.optim].is_paged,
            f"{spec.optim} pages its state between GPU and host; it needs device cuda",
        ),
        (spec.device == "cpu" and spec.attn == "flash_attention_2", "flash_attention_2 needs device cuda"),
        (
            spec.device == "cpu" and spec.alloc_conf is not None,
            "alloc_conf sets the CUDA caching allocator; it needs device cuda",
        ),
        (
            spec.device == "cpu" and spec.limit_vram is not None,
            "limit_vram holds a part of a GPU's memory; it needs device cuda",
        ),
        (
            spec.trust_remote_code and spec.weights == "random",
            "trust_remote_code runs a checkpoint's own code; it needs weights pretrained",
        ),
        (
            spec.num_layers is not None and spec.weights == "pretrained",
            "a depth cut (num_layers) keeps no checkpoint's weights; use weights random",
        ),
    ]


def _architecture_reasons(spec: Cell) -> list[str]:
    reasons = []
    longest = spec.learned_positions
    if longest is not None and spec.seq_len > longest:
        reasons.append(f"seq_len {spec.seq_len} is longer than the {longest} learned positions of {spec.model}")
    if spec.attn == "sdpa" and spec.model_type in NO_SDPA:
        reasons.append(f"transformers has no sdpa attention for {spec.model_type}; use attn eager")
    if spec.attn == "flash_attention_2" and spec.model_type in _NO_FLASH:
        other = "eager" if spec.model_type in NO_SDPA else "sdpa"
        reasons.append(f"transformers has no flash_attention_2 for {spec.model_type}; use attn {other}")
    if spec.fused_linear_cross_entropy and spec.model_type in _NO_FUSED_LOSS:
        reasons.append(f"liger-kernel has no fused_linear_cross_entropy for {spec.model_type}; leave it out")
    return reasons
