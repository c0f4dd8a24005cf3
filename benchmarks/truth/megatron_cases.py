"""NVIDIA's functional tests of Megatron-LM as commands for an emulated GPU: which cases, with which words.

In: a clone of Megatron-LM. Out: the words after ``torchrun``, and the peak that NVIDIA published for the last rank.
What is replaced: the corpus by ``--mock-data`` and its tokenizer by one with as many words, paths by none, Transformer
Engine by Megatron's own layers. Everything else is the case's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TESTS = Path("tests/functional_tests/test_cases")
#: Of files that NVIDIA has and we do not, of checkpoints, and of what is written beside a run.
_DROPPED = {
    *("--data-path", "--vocab-file", "--merge-file", "--split", "--tokenizer-type", "--data-cache-path"),
    *("--save", "--load", "--tensorboard-dir"),
    *("--log-validation-ppl-to-tensorboard", "--log-timers-to-tensorboard", "--log-memory-to-tensorboard"),
    *("--async-save", "--use-persistent-ckpt-worker", "--ckpt-format", "--dist-ckpt-strictness", "--save-interval"),
    *("--ckpt-fully-parallel-load", "--dist-ckpt-optim-fully-reshardable", "--attention-backend"),
}
#: Words of GPT-2's vocabulary; of BERT's cased one, with T5's 100 beside it.
_WORDS = {"gpt": 50257, "moe": 50257, "t5": 29096}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A functional test; ``stand_ins``: Apex's kernels are replaced by functions that allocate the same. One rank alone
    is the first of the last tensor-parallel group: the others take from it whether there is data."""

    name: str  # folder and case
    rank: int | None = None  # the one that runs; None: all eight
    stand_ins: bool = True
    engine: bool = False  # NVIDIA ran it with Transformer Engine
    cause: str = ""  # of the difference

    def words(self, clone: Path) -> list[str]:
        """The program and its arguments."""
        given = _config(clone, self.name)["MODEL_ARGS"]
        kept = {key: value for key, value in given.items() if key not in _DROPPED}
        kept |= {"--transformer-impl": "local", "--mock-data": True, "--tokenizer-type": "NullTokenizer"}
        kept["--vocab-size"] = _WORDS[self.name.split("/")[0]] - 1
        if not self.stand_ins:
            kept |= {"--no-persist-layer-norm": True, "--no-masked-softmax-fusion": True}
        program = "examples/t5/pretrain_t5.py" if self.name.startswith("t5/") else "pretrain_gpt.py"
        return [program, *(str(word) for pair in kept.items() for word in pair if word is not True)]

    def published(self, clone: Path) -> dict[str, int]:
        """Bytes of the last iteration by container and machine (``dev_dgx_a100``), of the last rank."""
        found = sorted((clone / TESTS / self.name).glob("golden_values_*.json"))
        read = {path.stem.removeprefix("golden_values_"): json.loads(path.read_text()) for path in found}
        return {
            key: int(_last(value["mem-max-allocated-bytes"])) for key, value in read.items() if not key.endswith("_2nd")
        }

    def seconds(self, clone: Path) -> float:
        """Seconds of the last iteration on A100s."""
        path = clone / TESTS / self.name / "golden_values_dev_dgx_a100.json"
        return float(_last(json.loads(path.read_text())["iteration-time"]))


def _config(clone: Path, name: str) -> dict[str, Any]:
    return yaml.safe_load((clone / TESTS / name / "model_config.yaml").read_text())


def _last(series: dict[str, Any]) -> Any:
    values = series["values"]
    return values[max((key for key in values if values[key] != "nan"), key=int)]


_ROUNDED = "blocks of the allocator's smallest size, 512 bytes, one or a few: which scalars they are is unexplained"
_LAST_STAGE = (
    "65,536 of the bytes are tokens and position ids, which the Megatron-LM of the published runs (2025-10) kept on "
    "the last stage's GPU and today's does not: that tree, emulated, differs by 512 bytes"
)
_ENGINE = (
    "NVIDIA ran it with Transformer Engine, here Megatron's own layers ran with stand-ins for Apex; which tensors "
    "differ is unexplained"
)
CASES = (
    Case(name="gpt/gpt3_mcore_tp2_pp2_uninstall_te", stand_ins=False, cause=_ROUNDED),
    Case(name="gpt/gpt3_mcore_tp4_pp1", cause=_ROUNDED),
    Case(name="gpt/gpt3_mcore_tp1_pp2", rank=7, cause=_LAST_STAGE),
    Case(name="gpt/gpt3_mcore_tp1_pp4", rank=7, cause=_LAST_STAGE),
    Case(name="gpt/gpt3_mcore_te_tp1_pp1_uniform_full_recompute", rank=7, engine=True, cause=_ENGINE),
    Case(name="gpt/gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce", rank=7, engine=True, cause=_ENGINE),
    Case(name="moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer", rank=6, engine=True, cause=_ENGINE),
    Case(name="t5/t5_mcore_tp4_pp1", rank=4),
)
