"""Optimizers: what each needs, in one row that specs, bounds, workload and the page read.

In: nothing. Out: frozen rows by transformers' names. Sizes follow ``torch.optim``, transformers' Adafactor and
``bitsandbytes.optim``; the rules that turn a row into bytes stand in bounds/states.py. A new optimizer that
follows one of these libraries' rules is a row here. Imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """One optimizer. A copy is as many elements as the parameter has."""

    name: str  # transformers' own, or one in its style where transformers has none
    made_by: str  # the class that the workload makes
    options: dict[str, Any] | None = None  # its arguments beside parameters and learning rate
    aliases: tuple[str, ...] = ()  # transformers' other names for it
    short_name: str = ""  # in a cell's name, where it is not ``name``
    #: In the parameter's dtype; in fp32; in 8 bits, except small tensors and embeddings, in fp32; or Adafactor's means
    #: of rows and columns, in fp32.
    state: Literal["parameter", "fp32", "8bit", "factored"]
    state_copies: tuple[int, ...] = ()  # copies in each tensor of the state
    #: Where torch.optim counts a parameter's steps: in host memory, on the card, or, as counted here, with the state.
    counter: Literal["none", "host", "card", "state"] = "none"
    is_paged: bool = False  # large states lie in managed memory, which torch does not count
    takes_dtensors: bool = False  # stepped on fully_shard's DTensors (torch 2.13); the others raised
    has_cpu_adam: bool = False  # DeepSpeed replaces it by its CPUAdam where it offloads

    @property
    def needs_bitsandbytes(self) -> bool:
        """Return True if it is one of bitsandbytes'."""
        return self.made_by.startswith("bitsandbytes.")


_ROWS = (
    Optimizer(
        name="adamw_torch",
        short_name="adamw",
        made_by="torch.optim.AdamW",
        state="parameter",
        state_copies=(1, 1),
        counter="host",
        takes_dtensors=True,
        has_cpu_adam=True,
    ),
    Optimizer(
        name="adamw_torch_fused",
        short_name="adamw-fused",
        made_by="torch.optim.AdamW",
        options={"fused": True},
        state="parameter",
        state_copies=(1, 1),
        counter="card",
        takes_dtensors=True,
        has_cpu_adam=True,
    ),
    Optimizer(
        name="adamw_bnb_8bit",
        aliases=("adamw_8bit",),
        made_by="bitsandbytes.optim.AdamW",
        options={"optim_bits": 8},
        state="8bit",
        state_copies=(1, 1),
    ),
    Optimizer(
        name="adamw_bnb_32bit",
        made_by="bitsandbytes.optim.AdamW",
        options={"optim_bits": 32},
        state="fp32",
        state_copies=(1, 1),
    ),
    Optimizer(
        name="paged_adamw_8bit",
        made_by="bitsandbytes.optim.AdamW",
        options={"optim_bits": 8, "is_paged": True},
        state="8bit",
        state_copies=(1, 1),
        is_paged=True,
    ),
    Optimizer(
        name="paged_adamw_32bit",
        aliases=("paged_adamw",),
        made_by="bitsandbytes.optim.AdamW",
        options={"optim_bits": 32, "is_paged": True},
        state="fp32",
        state_copies=(1, 1),
        is_paged=True,
    ),
    Optimizer(
        name="lion_8bit",
        made_by="bitsandbytes.optim.Lion",
        options={"optim_bits": 8},
        state="8bit",
        state_copies=(1,),
    ),
    Optimizer(
        name="lion_32bit",
        made_by="bitsandbytes.optim.Lion",
        options={"optim_bits": 32},
        state="fp32",
        state_copies=(1,),
    ),
    Optimizer(
        name="ademamix",
        made_by="bitsandbytes.optim.AdEMAMix",
        options={"optim_bits": 32},
        state="fp32",
        state_copies=(2, 1),  # the fast and the slow moment in one tensor
    ),
    Optimizer(
        name="adafactor",
        made_by="transformers.Adafactor",
        options={"scale_parameter": False, "relative_step": False},
        state="factored",
    ),
    Optimizer(name="sgd", made_by="torch.optim.SGD", state="parameter", takes_dtensors=True),
    Optimizer(
        name="adagrad",
        made_by="torch.optim.Adagrad",
        state="parameter",
        state_copies=(1,),
        counter="state",
        takes_dtensors=True,
    ),
    Optimizer(
        name="rmsprop",
        made_by="torch.optim.RMSprop",
        state="parameter",
        state_copies=(1,),
        counter="state",
        takes_dtensors=True,
    ),
)
OPTIMIZERS: dict[str, Optimizer] = {row.name: row for row in _ROWS}
#: The row's name by each of transformers' names for it.
OPTIMIZER_NAMES: dict[str, str] = {name: row.name for row in _ROWS for name in (row.name, *row.aliases)}
