"""The published figures that ship under data/claims.csv, to be checked by claims/.

In: nothing. Out: frozen Claims, in file order.
"""

import re
from dataclasses import dataclass

from vramprobe.catalog.gpus import Gpu, find_gpu
from vramprobe.catalog.shipped import csv_rows, number, split


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One published figure to check: ``quantity`` lies in ``low``…``high`` (either may be null) in ``unit``."""

    id: str
    source: str
    topic: str
    statement: str
    params_b: float | None  # billions of parameters
    method: str | None
    quant: str | None
    lora_r: int | None
    batch_size: int | None
    seq_lens: tuple[int, ...]  # one, or the two ends that the source prints
    gradient_checkpointing: bool | None
    recipe: str | None
    gpus: tuple[Gpu, ...]
    num_gpus: int | None
    quantity: str
    low: float | None
    high: float | None
    unit: str
    models: tuple[str, ...]  # of the catalog, which the claim's size stands for, the most usual first
    rule: str  # of data/claim_rules.csv


def list_claims() -> list[Claim]:
    """Every shipped claim, in file order."""
    return [_claim(row) for row in csv_rows("claims.csv")]


def _claim(row: dict[str, str]) -> Claim:
    return Claim(
        id=row["id"],
        source=row["source"],
        topic=row["topic"],
        statement=row["statement"],
        params_b=number(row["params_b"], float),
        method=row["method"] or None,
        quant=row["quant"] or None,
        lora_r=number(row["lora_r"], int),
        batch_size=number(row["batch"], int),
        seq_lens=tuple(int(number) for number in re.findall(r"\d+", row["seq"])),
        gradient_checkpointing={"": None, "yes": True, "no": False}[row["grad_ckpt"]],
        recipe=row["recipe"] or None,
        gpus=tuple(find_gpu(name) for name in split(row["gpu"], "/")),
        num_gpus=number(row["n_gpus"], int),
        quantity=row["quantity"],
        low=number(row["low"], float),
        high=number(row["high"], float),
        unit=row["unit"],
        models=split(row["models"], "/"),
        rule=row["rule"],
    )
