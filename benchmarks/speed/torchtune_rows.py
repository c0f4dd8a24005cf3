"""The table of torchtune's README by its own command: Llama 3.2 3B, ``tune run full_finetune_single_device``.

In: a row of published_speed.csv. Out: what the command's second step launches. torchtune is of frameworks.py's pins
(0.6.1, whose README has the table still). The rows of the data set are alike; how long a document is decides the work
of flex attention alone, which the count leaves out.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.frameworks.frameworks import CONFIGS, FILES, environment_of, plain_environment, run_on_cards
from benchmarks.frameworks.stacks import home
from benchmarks.speed.published_steps import SpeedRow

CARD, _MODEL = "A100-80GB-SXM", "Llama-3.2-3B"
#: The README's baseline, packed: torch's AdamW and plain cross-entropy where today's configuration saves memory.
_COMMAND = (
    f"tune run full_finetune_single_device --config llama3_2/3B_full_single_device batch_size=2 dataset.packed=True "
    f"tokenizer.max_seq_len=4096 tokenizer.path={_MODEL}/tokenizer.model checkpointer.checkpoint_dir={_MODEL} "
    "checkpointer.checkpoint_files=[model.safetensors] output_dir=out dataset.source=json dataset.data_files=rows.json "
    "gradient_accumulation_steps=1 epochs=1 optimizer_in_bwd=False optimizer=torch.optim.AdamW optimizer.fused=True "
    "enable_activation_checkpointing=False"
).split()
#: By what a row says of its kernels.
_OVERRIDES = {
    "none": ("loss=torch.nn.CrossEntropyLoss",),
    "compile": ("loss=torch.nn.CrossEntropyLoss", "compile=True"),
    "compile+chunkedCE": ("loss=torchtune.modules.loss.CEWithChunkedOutputLoss", "compile=True"),
}
_COPIES = 9  # of the data set: two steps take 16,384 tokens


def command_of(row: SpeedRow) -> list[str] | None:
    """The command of a row; None where it is of no full training of the 3B model, or offloads."""
    is_full = row.family == "torchtune" and row.model == _MODEL and row.packed == "True"
    overrides = _OVERRIDES.get(row.fused_kernels or "")
    return None if not is_full or overrides is None or row.grad_checkpointing == "True" else [*_COMMAND, *overrides]


def prepare(work: Path, *, uv: str) -> dict[str, str]:
    """Its checkpoint and data in ``work`` -> the variables of a shell in which its environment is activated."""
    python = environment_of("hf", home(), uv)
    made_by = [str(python), str(FILES / "prepare.py")]
    config = str(CONFIGS / f"{_MODEL.lower()}.json")
    run_on_cards([[*made_by, "data", "data"], [*made_by, config, _MODEL, "one-file"]], work, python, CARD)
    rows = json.loads((work / "data" / "alpaca.json").read_text())
    (work / "rows.json").write_text("\n".join(map(json.dumps, rows * _COPIES)))
    return plain_environment(python)
