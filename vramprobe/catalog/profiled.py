"""The models that ``vramprobe profile --empty-weights`` knows and the catalog does not: encoders, embedding, language,
vision-language and speech models, pipelines of diffusers. Those whose images are counted can be a cell's, too.

In: a name as users write it. Out: a frozen ProfiledModel with its config.json's place, or None. Touches no network.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from vramprobe.catalog.shipped import csv_rows, data_file, split

Kind = Literal["encoder", "embedding", "language", "vision-language", "speech", "diffusion"]


class ProfiledModel(NamedTuple):
    """One model: its config.json, of kind "diffusion" the JSON files of its parts by path; and what is known of it."""

    name: str  # slug
    hf_id: str
    also: tuple[str, ...]  # other ids and slugs with the same config; a slug of the catalog is its language model alone
    kind: Kind
    dtype: str | None  # of the checkpoint's weights on the hub; null where no source tells it
    pooling: str | None  # of an embedding model: mean or lasttoken
    config: Path
    source: str

    @property
    def has_counted_images(self) -> bool:
        """Return True if its images are counted, so that it can be a cell's model."""
        from vramprobe.architecture.images import knows_images  # not for --help

        return knows_images(json.loads(self.config.read_text(encoding="utf-8")))

    def why_not_predicted(self, given: str) -> str:
        """One line for verbs that take a cell."""
        article = "an" if self.kind[0] in "aeiou" else "a"
        of = "models of its family" if self.kind == "language" else "those"
        return (
            f"{given} is {article} {self.kind} model, and {of} are not predicted. Run its training "
            f"command on an emulated GPU: vramprobe profile --emulate GPU --empty-weights -- COMMAND."
        )


@cache
def list_profiled() -> tuple[ProfiledModel, ...]:
    """All of them, in the order of MODELS.csv."""
    return tuple(
        ProfiledModel(
            name=row["slug"],
            hf_id=row["hf_id"],
            also=split(row["also"], ";"),
            kind=_kind(row["kind"]),
            dtype=row["dtype"] or None,
            pooling=row["pooling"] or None,
            config=data_file(f"profiled/{row['slug']}.json"),
            source=row["source"],
        )
        for row in csv_rows("profiled/MODELS.csv")
    )


def _kind(text: str) -> Kind:
    match text:
        case "encoder" | "embedding" | "language" | "vision-language" | "speech" | "diffusion":
            return text
    raise AssertionError(f"profiled/MODELS.csv: kind {text!r}")


def reason_against_own_code(name: str) -> str:
    """Return why a vision-language model that runs code of its repository is not predicted; empty for another name."""
    row = next((row for row in csv_rows("models/OWN_CODE.csv") if re.fullmatch(row["pattern"], name.lower())), None)
    if row is None:
        return ""
    near = f"Of its size and in transformers: {row['instead']}. " if row["instead"] else ""
    return (
        f"{name} runs the Python code of its repository (trust_remote_code), not transformers', and is not predicted. "
        f"{near}Download it, and run its training command: vramprobe profile --emulate GPU -- COMMAND."
    )
