"""CellSpec: one configuration to run, frozen, checked, with everything resolved.

In: a value for each field, the whole architecture among them (resolve.py makes them of a user's words). Out: a
CellSpec, or pydantic's error with every combination that cannot be and why: which can run is said in rules/. Never
touches torch, a GPU or the network.
"""

import hashlib
import json
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from vramprobe import catalog
from vramprobe.architecture.images import Image, image_of, parse_image_size
from vramprobe.choices import (
    Attention,
    Autocast,
    CpRotation,
    Device,
    Dtype,
    KbitPrep,
    LoopName,
    Loss,
    Method,
    Offload,
    Optim,
    Quant,
    Sharding,
    Trainer,
    Weights,
)
from vramprobe.errors import SpecError
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.rules.cell import lora_target_names, reasons_against
from vramprobe.rules.images import reasons_against_images
from vramprobe.rules.not_sharded import reasons_not_run
from vramprobe.rules.sharding import rules_of
from vramprobe.trainers import TRAINERS, USUAL_LOOP
from vramprobe.units import parse_bytes, short_bytes

_LEARNED_POSITIONS = {"gpt2": "n_positions", "opt": "max_position_embeddings"}
_VERSION_OF_IDENTITY = 1
_LARGEST_NUMBER = 2**31 - 1  # of a cell's counts
#: Field → the least that it may be, and what is said of less.
_LEAST = {
    **dict.fromkeys(("batch_size", "seq_len", "grad_accum", "num_gpus", "cp_size"), (1, "must be at least 1")),
    "images": (0, "must be 0 or more"),
    "steps": (3, "must be at least 3: the first step creates the optimizer's state, the next two must repeat"),
    "timing_steps": (0, "must be 0 (no timing) or more"),
}


class CellSpec(BaseModel):
    """One cell: everything that decides its memory, resolved. Build it with :func:`resolve`, not by hand."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str
    architecture: dict[str, Any]  # the model's config.json, after the depth cut
    num_layers: int | None = None  # set when the depth was cut; None is the model's own depth
    weights: Weights = "random"
    trust_remote_code: bool = False

    method: Method
    quant: Quant
    kbit_prep: KbitPrep
    dtype: Dtype
    autocast: Autocast

    lora_r: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    lora_targets: str | tuple[str, ...] | None = None
    lora_dtype: Dtype | None = None
    dora: bool = False

    optim: Optim
    batch_size: int
    seq_len: int
    grad_accum: int = 1
    gradient_checkpointing: bool = False
    attn: Attention = "sdpa"
    padding: bool = False  # the last tokens of each sequence are padding, so that the model is passed a mask
    torch_compile: bool = False
    fused_linear_cross_entropy: bool = False  # Liger's head and loss in one, which never holds all logits
    loss: Loss = "nll"  # of the model's own forward, or TRL's from tiles of the logits
    trainer: Trainer = "sft"  # whose loss is computed, with what it holds beside the model
    loop: LoopName = USUAL_LOOP  # what the loop around the step keeps until the next one

    images: int = 0  # per sequence; their tokens come on top of seq_len
    image_size: str | None = None  # of each image, before the processor resizes it: "640x480"
    freeze_vision: bool = False  # neither trained parameters nor adapters in the vision tower and what projects it

    num_gpus: int = 1  # a rank each, with the cell's batch; under device-map, cards of one process
    sharding: Sharding | None = None  # of the ranks, or of the layers; null for one GPU
    shard_size: int | None = None  # ranks that have one model among them, where several groups do; null for one group
    cp_size: int = 1  # ranks that share each sequence (context parallelism), and have the same batch
    cp_rotation: CpRotation = "allgather"  # of keys and values among them
    offload: Offload = "none"  # what the ranks keep in host memory
    only_rank: int | None = None  # this one alone is run, answered as if the others were like it; emulated only

    device: Device
    alloc_conf: str | None = None  # PYTORCH_ALLOC_CONF for the cell's process; cuda only
    limit_vram: str | None = None  # the rest of the card is held, as if it had only this much: "24GiB"; cuda only
    steps: int = 3
    timing_steps: int = 2
    seed: int = 0

    @field_validator("image_size")
    @classmethod
    def _image_text(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            width, height = parse_image_size(value)
        except SpecError as error:
            raise ValueError(str(error)) from None
        return f"{width}x{height}"

    @field_validator("*")
    @classmethod
    def _within(cls, value: Any, info: ValidationInfo) -> Any:
        """Products of two of the largest still count bytes; no machine holds what is beyond."""
        least, why = _LEAST.get(info.field_name or "", (None, ""))
        if least is not None and value < least:
            raise ValueError(why)
        if info.field_name != "seed" and isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise ValueError(f"must be at most {_LARGEST_NUMBER:,}")
        return value

    @field_validator("seed")
    @classmethod
    def _a_seed(cls, value: int) -> int:
        if not 0 <= value < 2**63:
            raise ValueError("must be from 0 to 2^63 - 1, which is what torch takes")
        return value

    @field_validator("architecture")
    @classmethod
    def _names_its_type(cls, value: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(value.get("model_type"), str):
            raise ValueError("must name its model_type, as a config.json does")
        return value

    @field_validator("lora_targets")
    @classmethod
    def _targets_text(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        if isinstance(value, str) and value not in ("all-linear", "q_v"):
            value = tuple(name.strip() for name in value.split(",") if name.strip())
        if value == ():
            raise ValueError("names no module; use all-linear, q_v, or names such as q_proj,v_proj")
        if isinstance(value, tuple) and not all(re.fullmatch(r"[\w.]+", name) for name in value):
            raise ValueError("module names have letters, digits, _ and . only, such as q_proj,v_proj")
        return value

    @field_validator("limit_vram")
    @classmethod
    def _vram_text(cls, value: str | None) -> str | None:
        return None if value is None else short_bytes(catalog.memory_of(value))

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if reasons := reasons_against(self) + reasons_not_run(self) + reasons_against_images(self):
            raise ValueError("; ".join(reasons))
        return self

    @property
    def model_type(self) -> str:
        """transformers' ``model_type`` of the architecture, e.g. ``llama``."""
        return self.architecture["model_type"]

    @property
    def image(self) -> Image | None:
        """Image as the processor returns it; None without images."""
        return image_of(self.architecture, *parse_image_size(self.image_size)) if self.images else None

    @property
    def row_tokens(self) -> int:
        """Tokens of one sequence: those of its text and of its images."""
        return self.seq_len + (self.images * self.image.num_tokens if self.images else 0)

    @property
    def num_tokens(self) -> int:
        """Tokens of one micro-batch: rows × length, those of images included."""
        return self.num_rows * self.row_tokens

    @property
    def num_rows(self) -> int:
        """Sequences of one micro-batch: a trainer may have several for each of its examples."""
        return self.batch_size * TRAINERS[self.trainer].rows

    @property
    def model_label(self) -> str:
        """The model's name without its folders or organisation, and its depth when that was cut: ``gpt2@2layers``."""
        name = self.model.rstrip("/").split("/")[-1].removesuffix(".json")
        return name if self.num_layers is None else f"{name}@{self.num_layers}layers"

    @property
    def learned_positions(self) -> int | None:
        """The longest sequence that the model has an embedding for; None where positions are computed."""
        key = _LEARNED_POSITIONS.get(self.model_type)
        longest = self.architecture.get(key) if key else None
        return longest if isinstance(longest, int) else None

    @property
    def num_params(self) -> int:
        """Parameters of the model at the cell's depth, tied ones once (see :func:`vramprobe.catalog.num_params`)."""
        return catalog.num_params(self.model, self.architecture)

    @property
    def needs_bitsandbytes(self) -> bool:
        """Return True if its layers or its optimizer are bitsandbytes'; only those of its optimizers name their state's
        bits.
        """
        return self.quant != "none" or OPTIMIZERS[self.optim].needs_bitsandbytes

    @property
    def uses_trl(self) -> bool:
        """Return True if TRL's own code computes its loss."""
        return self.of_trl != ""

    @property
    def of_trl(self) -> str:
        """The option by which it does, as in ``loss chunked_nll``; empty where it does not."""
        if self.trainer != "sft":
            return f"trainer {self.trainer}"
        return f"loss {self.loss}" if self.loss == "chunked_nll" else ""

    @property
    def other_head(self) -> str:
        """The option by which head and loss are another library's than the model's; empty where they are its own."""
        return self.of_trl or ("" if self.loss == "nll" else f"loss {self.loss}")

    @property
    def fuses_head(self) -> bool:
        """Return True if log-probabilities come from tiles of the logits, by TRL's Triton kernels."""
        return self.loss == "chunked_nll" or TRAINERS[self.trainer].fuses_head

    @property
    def num_models(self) -> int:
        """2 where a reference model stands beside the one that is trained; with adapters that one is both."""
        return 2 if TRAINERS[self.trainer].has_reference and self.method == "full" else 1

    @property
    def limit_vram_bytes(self) -> int | None:
        """Bytes to which the GPU's memory is limited; None for all of it."""
        return None if self.limit_vram is None else parse_bytes(self.limit_vram)

    @property
    def is_sharded(self) -> bool:
        """Return True if it has ranks or several cards; one GPU is a rank where DeepSpeed offloads."""
        return self.sharding is not None

    @property
    def is_divided(self) -> bool:
        """Return True if ranks hold shards of the weights; 4-bit ones must then be stored as floats."""
        return rules_of(self.sharding).divides_weights

    @property
    def is_spread(self) -> bool:
        """Return True if one process has the layers on several cards."""
        return not rules_of(self.sharding).has_ranks

    @property
    def cell_id(self) -> str:
        """A readable name; two different cells of one sweep may share it only if their fingerprints differ too."""
        method = self.method if self.method != "qlora" else f"qlora-{self.quant}-{self.kbit_prep}"
        if self.method != "full":
            method += f"-r{self.lora_r}-{'+'.join(lora_target_names(self) or ['all'])}"
            method += "-dora" if self.dora else ""
        precision = self.dtype if self.autocast == "none" else f"{self.dtype}+{self.autocast}"
        parts = [
            self.model_label,
            method,
            precision,
            OPTIMIZERS[self.optim].short_name or self.optim,
            f"b{self.batch_size}s{self.seq_len}",
        ]
        parts += [f"ga{self.grad_accum}"] if self.grad_accum > 1 else []
        parts += ["ckpt"] if self.gradient_checkpointing else []
        parts += [self.attn] if self.attn != "sdpa" else []
        parts += [f"{self.images}x{self.image_size}"] if self.images else []
        parts += ["frozen-vision"] if self.freeze_vision else []
        parts += ["padded"] if self.padding else []
        parts += ["compiled"] if self.torch_compile else []
        parts += ["fused-loss"] if self.fused_linear_cross_entropy else []
        parts += [self.loss.replace("_", "-")] if self.loss != "nll" else []
        parts += [self.trainer] if self.trainer != "sft" else []
        parts += [self.loop] if self.loop != USUAL_LOOP else []
        parts += [f"on{self.limit_vram}"] if self.limit_vram else []
        groups = "" if self.shard_size is None else f"{self.shard_size}"
        parts += [f"{self.sharding}{groups}-x{self.num_gpus}"] if self.sharding else []
        parts += [f"cp{self.cp_size}"] if self.cp_size > 1 else []
        parts += [self.cp_rotation] if self.cp_rotation != "allgather" else []
        parts += [f"offload-{self.offload}"] if self.offload != "none" else []
        parts += [f"rank{self.only_rank}"] if self.only_rank is not None else []
        return "_".join(parts)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over everything resolved. The model's display name counts only where it decides the weights.

        Fields at their default stay out, so that a new field leaves old fingerprints (and so resumes) as they are; the
        other side of this is that a field's default never changes.
        """
        resolved = self.model_dump(mode="json", exclude_defaults=True)
        if self.weights == "random":
            del resolved["model"]
        text = json.dumps({"identity": _VERSION_OF_IDENTITY, **resolved}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
