"""A small training in a process of its own, for the tests of watch and callback: ``python watched_loop.py WHAT``."""

import json
import sys
from typing import Any

import torch
import transformers

import vramprobe

TINY = {
    "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loop(num_steps: int, rows: int = 8) -> None:
    """Train two linear layers."""
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.ones(rows, 1024, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def watched() -> dict[str, Any]:
    """A block, then a second one."""
    with vramprobe.watch(gpus="RTX-4090") as run:
        loop(4)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
    with vramprobe.watch() as second:
        loop(1, rows=4096)
    return {
        "rows": run.rows(),
        "headline": run.headline(),
        "html": run._repr_html_(),
        "causes": run.profile.causes(),
        "peak": peak,
        "outcome": run.profile.outcome.kind,
        "second": second.profile.highest_rank and second.profile.highest_rank.peak.allocated_bytes,
    }


def ran_out() -> dict[str, Any]:
    """A block that ends by an out-of-memory error, and one by another."""
    found: dict[str, Any] = {}
    try:
        with vramprobe.watch() as run:
            loop(2)
            torch.empty(2**36, device=DEVICE)
    except torch.OutOfMemoryError as error:
        found |= {"notes": error.__notes__, "outcome": run.profile.outcome.kind, "steps": run.rows()}
    try:
        with vramprobe.watch():
            raise KeyError("theirs")
    except KeyError as error:
        found["other"] = str(error)
    return found


def trained(**given: Any) -> dict[str, Any]:
    """A Trainer's run with the callback beside one that reports logs."""
    reported: list[dict[str, float]] = []

    class Reports(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **more):
            reported.append(dict(logs))

    callback = vramprobe.VramprobeCallback(**given)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    rows = [{"input_ids": [1] * 256, "labels": [1] * 256}] * 16
    args = transformers.TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, max_steps=4, logging_steps=2, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=DEVICE == "cpu",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=[Reports, callback])
    trainer.train()
    prediction = callback.prediction
    return {
        "reported": reported,
        "history": trainer.state.log_history,
        "outcome": callback.profile.outcome.kind,
        "instrument": callback.profile.instrument,
        "ranks": len(callback.profile.ranks),
        "why": callback.why_no_prediction,
        "predicted": prediction and prediction.peak_allocated_bytes.value,
        "options": prediction and {name: value for name, value in prediction.options.items() if name != "model"},
    }


if __name__ == "__main__":
    print(json.dumps({"watched": watched, "ran_out": ran_out, "trained": trained}[sys.argv[1]]()))
