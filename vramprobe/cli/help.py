"""The help of the command line: verbs in groups, and a verb's options in panels, those that matter first.

In: typer's commands. Out: text as wide as the terminal, 100 columns at most. An option's words are its own; here is
only where it stands.
"""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from vramprobe.cli.grpo import GRPO_OPTIONS
from vramprobe.cli.serve import SERVE_OPTIONS
from vramprobe.options import ADAPTER_OPTIONS, RANK_OPTIONS

#: Group → its verbs, in the order in which they are needed.
VERBS = {
    "Ask": ("predict", "serve", "grpo", "recommend", "techniques", "explain"),
    "Look": ("profile", "diff", "measure", "doctor"),
    "Sweep": ("plan", "run", "launch", "status", "collect"),
    "Publish": ("fit", "evaluate", "calibrate", "claims", "report", "check", "merge", "contribute", "export"),
    "Set up": ("emulate", "recipes", "calibrate-gpu", "models", "gpus", "mcp"),
}
#: Panel → its options, by parameter.
PANELS = {
    "Model": ("model", "quant", "dtype", "images", "image_size", "freeze_vision", "num_layers", "weights",
              "trust_remote_code"),
    "Batch": ("batch_size", "seq_len", "grad_accum", "padding", "lengths", "sampler", "pad_to_multiple_of",
              "replay_steps"),
    "Method": ("method", "gradient_checkpointing", *ADAPTER_OPTIONS, "optim", "trainer", "loop", "loss",
               "fused_linear_cross_entropy", "recipe", "autocast", "kbit_prep", "attn", "torch_compile", "steps",
               "timing_steps", "seed"),
    "GPUs": ("gpu", "limit_vram", *RANK_OPTIONS, "alloc_conf", "device"),
    "Question": ("max_batch", "max_seq_len", "largest_model", "min_gpus", "changes"),
    "vLLM": tuple(SERVE_OPTIONS),
    "GRPO": tuple(name for name in GRPO_OPTIONS if name not in SERVE_OPTIONS),
}  # fmt: skip
_REST = "Output and more"
#: Verb → a command that answers.
EXAMPLES = {
    "predict": "predict --model llama-3.1-8b --method qlora --batch-size 1 --seq-len 2k --gpu RTX-4090",
    "serve": "serve --model llama-3.1-8b --gpu H100-SXM --max-model-len 8k",
    "grpo": "grpo --model llama-3.1-8b --method lora --gradient-checkpointing --gpu H100-SXM",
    "recommend": "recommend --model llama-3.1-8b --method lora --seq-len 2k --tokens 50M",
    "profile": "profile --emulate RTX-4090 --empty-weights -- python train.py",
    "explain": "explain train.log",
    "run": "run quickstart --emulate H200",
}
_MOST_COLUMNS, _FLAG_COLUMNS = 100, 29


def verb_help(path: str, text: str, parameters: Sequence[Any]) -> str:
    """The help of one verb."""
    columns = _columns()
    panels = _in_panels([one for one in parameters if not getattr(one, "hidden", False)])
    parts = [f"Usage: {path} {_usage(parameters)}", "", *textwrap.wrap(" ".join(text.split()), columns)]
    if example := EXAMPLES.get(path.removeprefix("vramprobe ")):
        parts += ["", f"  vramprobe {example}"]
    for panel, own in panels.items():
        parts += ["", panel, *_rows([(_typed(one), _said(one)) for one in own], columns)]
    return "\n".join(parts)


def root_help(text: str, verbs: dict[str, str]) -> str:
    """The help of the command line; ``verbs``: name → what it does."""
    columns = _columns()
    parts = ["Usage: vramprobe VERB [OPTIONS]", "", *textwrap.wrap(text, columns)]
    for group, names in VERBS.items():
        parts += ["", group, *_rows([(name, verbs[name]) for name in names if name in verbs], columns, 16)]
    return "\n".join([*parts, "", "vramprobe VERB --help shows a verb's options; --version the version."])


def _columns() -> int:
    return max(60, min(_MOST_COLUMNS, shutil.get_terminal_size().columns))


def _in_panels(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    panel_of = {name: panel for panel, names in PANELS.items() for name in names}
    found: dict[str, list[Any]] = {panel: [] for panel in (*PANELS, _REST)}
    for one in parameters:
        found[panel_of.get(one.name, _REST)].append(one)
    for panel, names in PANELS.items():
        found[panel].sort(key=lambda one, names=names: names.index(one.name))
    return {panel: own for panel, own in found.items() if own}


def _usage(parameters: Sequence[Any]) -> str:
    needed = [_typed(one) for one in parameters if one.required and one.param_type_name == "option"]
    arguments = [_typed(one) for one in parameters if one.param_type_name == "argument"]
    return " ".join([*needed, "[OPTIONS]", *arguments])


def _typed(parameter: Any) -> str:
    """As it is typed, with what stands for its value."""
    if parameter.param_type_name == "argument":
        name = {"command": "-- COMMAND"}.get(parameter.name, parameter.name.upper())
        return name if parameter.required else f"[{name}]"
    flags: list[str] = sorted(parameter.opts, key=len)
    names = ", ".join(flags)
    if parameter.is_flag:  # one that is on has a use by its other name alone
        return ", ".join([names, *parameter.secondary_opts]) if parameter.default is True else names
    value = parameter.metavar or {"int": "N", "float": "X", "Path": "PATH"}.get(_kind(parameter), "WORD")
    return f"{names} {value}"


def _kind(parameter: Any) -> str:
    return getattr(parameter.type_descriptor.annotation, "__name__", "str")


def _said(parameter: Any) -> str:
    return " ".join((parameter.help or "").split())


def _rows(rows: Sequence[tuple[str, str]], columns: int, first: int = _FLAG_COLUMNS) -> list[str]:
    """Two columns; a first one that is too long has a line of its own."""
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, columns - first - 2, break_long_words=False, break_on_hyphens=False) or [""]
        if len(left) + 3 > first:
            lines.append(f"  {left}")
        else:
            lines.append(f"  {left:<{first}}{wrapped.pop(0)}".rstrip())
        lines += [f"  {'':<{first}}{line}" for line in wrapped]
    return lines
