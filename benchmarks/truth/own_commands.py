"""Commands asked afterwards: ``python benchmarks/truth/own_commands.py`` rebuilds own_commands.md and its CSV.

Each command is profiled once with its recipe, predicted by ``vramprobe predict --from`` at shapes that it never saw,
and then run at these shapes on the same emulated GPU. Some minutes; ``--only NAME`` runs one command and keeps the
other rows; ``--check`` says whether the page is what the CSV gives.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import journal
from benchmarks.tables import as_csv, as_table, filled, read_csv, write_or_check

PAGE, CSV = (Path(__file__).with_suffix(end) for end in (".md", ".csv"))
GPU = "H100-SXM"
OWN, SHAPES = (4, 512), ((8, 1024), (2, 3072), (1, 640))

_MODEL = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
rows, length = map(int, sys.argv[1:3])
model = LlamaForCausalLM(LlamaConfig(hidden_size=512, intermediate_size=1536, num_hidden_layers=6, vocab_size=32000,
    num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=16384))
"""
COMMANDS = {
    "plain loop": _MODEL
    + """
import torch
model = model.cuda()
data = [torch.randint(0, 32000, (length,)) for _ in range(64 * rows)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in torch.utils.data.DataLoader(data, batch_size=rows):
    batch = batch.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    "transformers Trainer": _MODEL
    + """
from datasets import Dataset
from transformers import Trainer, TrainingArguments
data = Dataset.from_list([{"input_ids": [1] * length, "labels": [1] * length, "attention_mask": [1] * length}] * 256)
arguments = TrainingArguments("out", per_device_train_batch_size=rows, gradient_accumulation_steps=2, bf16=True,
    gradient_checkpointing=True, report_to="none", save_strategy="no", max_steps=50, disable_tqdm=True)
Trainer(model, arguments, train_dataset=data).train()
""",
    "TRL SFT, LoRA": _MODEL
    + """
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")),
    pad_token="b", eos_token="b")
arguments = SFTConfig("out", per_device_train_batch_size=rows, max_length=length, bf16=True, report_to="none",
    save_strategy="no", max_steps=50, disable_tqdm=True)
SFTTrainer(model, arguments, train_dataset=Dataset.from_list([{"input_ids": [0] * length}] * 256),
    processing_class=tokenizer, peft_config=LoraConfig(r=16, target_modules="all-linear")).train()
""",
}


def rows_of(name: str, home: Path) -> list[dict[str, Any]]:
    """A row for each shape: what was predicted without running it, and what ran."""
    (home / "train.py").write_text(COMMANDS[name])
    _, profile_seconds = _profile(home, OWN, "own")
    if not (home / "own" / "recipe").exists():
        sys.exit(f"{name}: no recipe was kept")
    found = []
    for rows, length in SHAPES:
        started = time.perf_counter()
        words = ["predict", "--from", "own", "--batch-size", str(rows), "--seq-len", str(length), "--json"]
        said = subprocess.run([sys.executable, "-m", "vramprobe", *words], cwd=home, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        if said.returncode:
            sys.exit(f"{name} at {rows} x {length}: {said.stderr}")
        predicted = json.loads(said.stdout)
        seen, _ = _profile(home, (rows, length), f"{rows}x{length}", "--no-probe")
        found.append(
            {
                "command": name,
                "own": f"{OWN[0]} x {OWN[1]}",
                "asked": f"{rows} x {length}",
                "allocated_bytes": seen["allocated_bytes"],
                "predicted_allocated_bytes": predicted["peak_allocated_bytes"]["value"],
                "reserved_bytes": seen["reserved_bytes"],
                "predicted_reserved_bytes": predicted["reserved_bytes"]["value"],
                "recipe_bytes": (home / "own" / "recipe").stat().st_size,
                "profile_seconds": round(profile_seconds),
                "predict_seconds": round(seconds, 1),
                "held_out": next(one for one in predicted["warnings"] if "held out" in one),
            }
        )
        print(found[-1], flush=True)
    return found


def _profile(home: Path, shape: tuple[int, int], folder: str, *options: str) -> tuple[Any, float]:
    """(the run's peak, seconds)."""
    started = time.perf_counter()
    words = ["--emulate", GPU, "--steps-only", "--no-speed", "--folder", folder, *options]
    record = journal.profiled(words, ["python", "train.py", *map(str, shape)], cwd=home, quiet=True)
    return record["ranks"][0]["peak"], time.perf_counter() - started


def page(rows: Sequence[dict[str, str]]) -> str:
    """The page of the CSV's rows."""
    table = [
        {"command": one["command"], "profiled at": one["own"], "asked": one["asked"]}
        | {"allocated, run": f"{int(one['allocated_bytes']):,}", "allocated, predicted": _off(one, "allocated")}
        | {"reserved, run": f"{int(one['reserved_bytes']):,}", "reserved, predicted": _off(one, "reserved")}
        | {"recipe": f"{int(one['recipe_bytes']) / 1000:.1f} kB"}
        for one in rows
    ]
    equal = sum(one["allocated_bytes"] == one["predicted_allocated_bytes"] for one in rows)
    worst = max(abs(_error(one, "reserved")) for one in rows)
    return filled(PAGE, gpu=GPU, equal=equal, cases=len(rows), worst=f"{worst:.2%}", table=as_table(table, "lllrrrrr"))


def _error(row: dict[str, str], tier: str) -> float:
    seen = int(row[f"{tier}_bytes"])
    return (int(row[f"predicted_{tier}_bytes"]) - seen) / seen


def _off(row: dict[str, str], tier: str) -> str:
    return "equal" if _error(row, tier) == 0 else f"{_error(row, tier):+.3%}"


def main() -> None:
    """Run, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the page with the CSV")
    parser.add_argument("--only", choices=COMMANDS, help="run this command alone")
    asked = parser.parse_args()
    for name in [] if asked.check else [asked.only] if asked.only else COMMANDS:
        with tempfile.TemporaryDirectory(prefix="own-commands-") as home:
            made = rows_of(name, Path(home))
        rows = [one for one in read_csv(CSV) if one["command"] != name] + made
        rows.sort(key=lambda one: list(COMMANDS).index(one["command"]))
        CSV.write_text(as_csv(rows))
    write_or_check({PAGE: page(read_csv(CSV))}, "truth/own_commands.py", check=asked.check)


if __name__ == "__main__":
    main()
