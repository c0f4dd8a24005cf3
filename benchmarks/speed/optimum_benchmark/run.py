"""Time tiny CPU training cells of optimum-benchmark; ``cell_overhead.py`` runs this with the python that has it.

In: the folder of a model's config.json and the cell's shape. Out: one line of JSON, the last of stdout. Nothing of
optimum-benchmark is patched. Its ``no_weights: true`` fetches config.json from the hub even for a local path
(backends/base.py, ``create_no_weights_model_fast``), so random weights are saved once, untimed, and loaded as a
checkpoint; a cell is timed from a finished configuration to its report.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import tempfile
import time

QUIET_AND_OFFLINE = {"HF_HUB_OFFLINE": "1", "LOG_LEVEL": "ERROR", "LOG_TO_FILE": "0", "TOKENIZERS_PARALLELISM": "false"}


def save_random_model(config_folder: str, folder: str) -> None:
    """A checkpoint with random fp32 weights, and no tokenizer: text-generation training asks for none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_folder)).save_pretrained(folder)


def timed_cells(model: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Each cell through ``Benchmark.launch``: wall seconds, its steps' seconds, and the memory it reports."""
    from optimum_benchmark import Benchmark, BenchmarkConfig, ProcessConfig, PyTorchConfig, TrainingConfig

    cells = []
    for seed in range(options.cells):
        config = BenchmarkConfig(
            name=f"tiny_training_{seed}",
            launcher=ProcessConfig(start_method=options.start_method),
            backend=PyTorchConfig(
                model=model,
                task="text-generation",
                library="transformers",
                device="cpu",
                torch_dtype="float32",
                seed=seed,
            ),
            scenario=TrainingConfig(
                memory=True,
                max_steps=options.steps,
                warmup_steps=1,
                dataset_shapes={
                    "dataset_size": options.steps * options.batch_size,
                    "sequence_length": options.seq_len,
                },
                training_arguments={"per_device_train_batch_size": options.batch_size, "optim": options.optim},
            ),
        )
        began = time.perf_counter()
        overall = Benchmark.launch(config).overall
        seconds = time.perf_counter() - began
        if overall.latency.count != options.steps:
            raise RuntimeError(f"asked for {options.steps} steps, optimum-benchmark ran {overall.latency.count}")
        cells.append({"seconds": seconds, "steps_seconds": overall.latency.total, "max_ram_mb": overall.memory.max_ram})
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config_folder")
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--optim", required=True)
    parser.add_argument("--cells", type=int, required=True)
    parser.add_argument("--start-method", choices=("spawn", "fork"), required=True)
    options = parser.parse_args()
    options.config_folder = os.path.abspath(options.config_folder)
    os.environ.update(QUIET_AND_OFFLINE)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # the Trainer leaves its output folder where it runs
        # In a process of its own: this one must not hold libraries that optimum-benchmark's own would not.
        saving = multiprocessing.get_context("spawn").Process(
            target=save_random_model, args=(options.config_folder, "model")
        )
        saving.start()
        saving.join()
        if saving.exitcode:
            raise SystemExit(f"the random checkpoint could not be saved (exit status {saving.exitcode})")
        cells = timed_cells(os.path.abspath("model"), options)
        os.chdir("/")
    versions = {name: importlib.metadata.version(name) for name in ("optimum-benchmark", "transformers", "torch")}
    print(json.dumps({"cells": cells, "versions": versions}))


if __name__ == "__main__":
    main()
