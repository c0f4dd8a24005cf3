"""A mistake in a command line's words → one line: what was given, what is allowed, what to do.

In: the exception by which typer ends, the words that were typed. Out: a sentence. An option of another library or of
another verb is answered with this verb's own word for it, or with the command that knows it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vramprobe.cli.help import EXAMPLES, VERBS
from vramprobe.emulate.environment import OTHER_VERSIONS
from vramprobe.interop.arguments import FIELDS, OPTION_OF
from vramprobe.options import MEASURED_OPTIONS, RANK_OPTIONS


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


_OPTION_OF = OPTION_OF | FIELDS["adapters"]["option_of"]
#: Key of Axolotl's or LLaMA-Factory's file → field of transformers', TRL's or peft's configuration.
_RENAMED = {
    key: field for name in ("axolotl", "llamafactory") for part in ("arguments", "adapter")
    for key, field in FIELDS[name][part].items()
}  # fmt: skip
#: An option of transformers, TRL, peft, accelerate, Axolotl or vLLM, as letters and digits alone → its parameter here.
FOREIGN = {
    **{_letters(field): option for field, option in _OPTION_OF.items() if field != option},
    **{_letters(key): _OPTION_OF[field] for key, field in _RENAMED.items() if _OPTION_OF.get(field, key) != key},
    **dict.fromkeys(
        ("worldsize", "nprocpernode", "numprocesses", "ngpus", "numdevices", "tensorparallelsize"), "num_gpus"
    ),
    **dict.fromkeys(("lorarank", "rank", "r"), "lora_r"),
    **dict.fromkeys(("targetmodules", "loratargetmodules", "loratarget"), "lora_targets"),
    **dict.fromkeys(("cutofflen", "sequencelen", "modelmaxlength", "maxtokens"), "seq_len"),
    **dict.fromkeys(("microbatchsize", "trainmicrobatchsizepergpu", "bs"), "batch_size"),
    "gradientaccumulation": "grad_accum",
    **dict.fromkeys(("modelnameorpath", "basemodel", "modelid", "modelname"), "model"),
    **dict.fromkeys(
        ("gradientcheckpointingkwargs", "activationcheckpointing", "activationcheckpointingkwargs"),
        "gradient_checkpointing",
    ),
    **dict.fromkeys(("loadin4bit", "loadin8bit", "quantbits", "bits"), "quant"),
    **dict.fromkeys(("usepeft", "pefttype", "finetuningtype", "adapter"), "method"),
    **dict.fromkeys(("bf16", "fp16", "torchdtype"), "dtype"),
    **dict.fromkeys(("attnimplementation", "flashattn", "flashattention"), "attn"),
    **dict.fromkeys(("deepspeed", "fsdp", "fsdpconfig", "fsdp2", "zerostage", "zero1", "zero2", "zero3"), "sharding"),
    **dict.fromkeys(("offloadoptimizer", "offloadparam", "cpuoffload"), "offload"),
    **dict.fromkeys(
        ("liger", "ligerkernel", "useliger", "useligerkernel", "enableligerkernel", "ligerkernelconfig"),
        "fused_linear_cross_entropy",
    ),
    "losstype": "loss",
    **dict.fromkeys(("gpumemory", "vram", "card"), "gpu"),
}
#: Parameter → the word of another kind of verb for it.
_ELSEWHERE = {"seq_len": "max_model_len", "batch_size": "max_num_seqs"}
#: Verb and parameter → why there is none, and what to do.
_NONE: dict[tuple[str, str], str] = {
    **{
        ("grpo", name): "it predicts one GPU, with a whole model each for trainer and engine; predict has it for the "
        "trainer alone, and vramprobe profile --emulate 'GPU x8' -- COMMAND runs the whole"
        for name in RANK_OPTIONS
    },
    **{
        (verb, name): "it changes how a cell is measured, not what it takes: drop it, or run vramprobe measure"
        for verb in ("predict", "grpo", "recommend", "techniques")
        for name in MEASURED_OPTIONS
    },
    **{("predict", name): "an engine that serves a model is vramprobe serve" for name in ("serve", "vllm")},
    ("predict", "stack"): "other library versions are recorded, with an interpreter that has them: --python PATH; "
    f"`{OTHER_VERSIONS}` makes one, with your versions",
    ("serve", "engine"): "it predicts vLLM alone; vramprobe explain reads SGLang's errors",
}
_ANY_RUN = "vramprobe profile --emulate GPU --empty-weights -- python train.py"


def _reasons() -> dict[str, str]:
    """Field of another library's configuration, as letters alone → why a cell has no such option, and what to do."""
    said = {}
    for part in (FIELDS[name] for name in ("files", "arguments", "adapters", "typed")):
        for field in part.get("harmless", "").split():
            said[field] = "it changes no memory of a step: drop it"
        for field, why in part.get("named", {}).items():
            said[field] = f"{why}; drop it, or run the script: {_ANY_RUN}"
        for field, why in part.get("refused", {}).items():
            said[field] = f"it {why}, which is not predicted; run the script: {_ANY_RUN}"
    said |= {key: said[field] for key, field in _RENAMED.items() if field in said}
    return {_letters(field): why for field, why in said.items()}


def in_one_line(error: Any, words: Sequence[str], verbs: Mapping[str, Any]) -> str:
    """Return the sentence; ``error`` is click's, ``words`` what followed ``vramprobe``, ``verbs`` its commands."""
    verb = next((word for word in words[:1] if word in verbs), "")
    name = getattr(error, "option_name", "")
    if name and verb and not getattr(error, "param", None) and type(error).__name__ == "NoSuchOption":
        return f"{verb} has no option {name}: {_instead(verb, name, getattr(error, 'possibilities', ()), verbs)}"
    text = _missing(error) or " ".join(error.format_message().split()).rstrip(".")
    if given := _given(getattr(error, "param", None), words):
        text = f"{given[0]}: {given[1]!r} given; {re.sub(r'^Invalid value for .*?: ', '', text)}"
    text = text.removeprefix("Invalid value: ")
    example = f", for example: vramprobe {EXAMPLES[verb]}" if "issing " in text and verb in EXAMPLES else ""
    return f"{text}{example}; `vramprobe {verb + ' ' if verb else ''}--help` says what there is"


def _instead(verb: str, name: str, near: Sequence[str] | None, verbs: Mapping[str, Any]) -> str:
    letters = _letters(name)
    own = {one.name: one for one in verbs[verb].params}
    parameter = FOREIGN.get(letters, name.lstrip("-").replace("-", "_").lower())
    if (verb, parameter) in _NONE:
        return _NONE[verb, parameter]
    for word in (parameter, _ELSEWHERE.get(parameter, "")):
        if word in own:
            return f"here it is {_flag(own[word])}"
    ordered = [other for group in VERBS.values() for other in group if other in verbs]
    have = [other for other in ordered if any(one.name == parameter for one in getattr(verbs[other], "params", ()))]
    if have:
        return f"{' and '.join(have[:2])} {'has' if len(have) == 1 else 'have'} it"
    if "model" in own and (reason := _reasons().get(letters)):
        return reason
    listed = f"`vramprobe {verb} --help` lists its options"
    listed += f"; a script runs with all of its own: {_ANY_RUN}" if "batch_size" in own else ""
    return f"nearest: {', '.join(sorted(near)[:3])}; {listed}" if near else listed


def _missing(error: Any) -> str:
    """All that is required and was not given, where the error is of the first; what was given is read before."""
    if type(error).__name__ != "MissingParameter" or error.ctx is None:
        return ""
    missing = [one for one in error.ctx.command.params if one.required and one.name not in error.ctx.params]
    return f"Missing {', '.join(_flag(one) if one.opts[0].startswith('-') else one.name.upper() for one in missing)}"


def _given(parameter: Any, words: Sequence[str]) -> tuple[str, str] | None:
    """The option and the value that was typed for it."""
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if parameter is not None and flag in getattr(parameter, "opts", ()):
            return (flag, value) if equals else (flag, words[at + 1]) if at + 1 < len(words) else None
    return None


def _flag(parameter: Any) -> str:
    return max(parameter.opts, key=len)
