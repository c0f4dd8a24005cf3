"""peft's LoraConfig, as an object, a dict or an adapter_config.json → a cell's options, and notes.

In: the configuration. Out: Words. A field that adds memory which is not counted is refused, one that takes some away is
named.
"""

import sys
from collections.abc import Mapping
from typing import Any

from vramprobe.errors import SpecError
from vramprobe.interop import Words
from vramprobe.interop.arguments import FIELDS

_OWN = FIELDS["adapters"]
OPTION_OF, NAMED, REFUSED = _OWN["option_of"], _OWN["named"], _OWN["refused"]
READ, HARMLESS = _OWN["read"].split(), _OWN["harmless"].split()
_NOTHING = (None, False, "", "none", [], {}, "None")


def read_adapter(config: Any, model_type: str) -> Words:
    """Return the options of LoRA for a model of ``model_type``. Raises SpecError for another kind of adapter, and for
    fields whose memory is not counted."""
    fields = config if isinstance(config, Mapping) else getattr(config, "to_dict", lambda: None)()
    if not isinstance(fields, Mapping) or "peft_type" not in fields:
        raise SpecError(f"peft_config: {type(config).__name__} given; give a LoraConfig, or its dict")
    kind = str(getattr(fields["peft_type"], "value", fields["peft_type"]))
    if kind != "LORA":
        raise SpecError(
            f"peft_config of {kind} is not predicted, only LORA; `vramprobe profile --emulate GPU -- COMMAND` runs it"
        )
    refused = [f"{name} {why}" for name, why in REFUSED.items() if fields.get(name) not in _NOTHING]
    if refused:
        raise SpecError(
            f"peft_config: {'; '.join(refused)}: not predicted; leave it out, or "
            "`vramprobe profile --emulate GPU -- COMMAND` runs it"
        )
    options = {option: fields[name] for name, option in OPTION_OF.items() if fields.get(name) is not None}
    notes = [f"peft_config.{name}: {why}" for name, why in NAMED.items() if fields.get(name) not in (*_NOTHING, True)]
    known = {*OPTION_OF, *READ, *HARMLESS, *NAMED, *REFUSED}
    notes += [
        f"peft_config.{name}: {value!r} is not known to vramprobe, and not counted"
        for name, value in fields.items()
        if name not in known and value not in _NOTHING
    ]
    return Words(options | {"lora_targets": _targets(fields.get("target_modules"), model_type)}, tuple(notes))


def _targets(given: Any, model_type: str) -> str:
    """``target_modules`` in a cell's words; peft's own default for the family where nothing is given."""
    if given is None:
        constants = sys.modules.get("peft.utils.constants")  # there if the configuration is an object
        known = getattr(constants, "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING", {model_type: "q_v"})
        if model_type not in known:
            raise SpecError(
                f"peft_config.target_modules: none given, and peft has no default for {model_type}; name them, or "
                "'all-linear'"
            )
        given = known[model_type]
    if isinstance(given, str):
        if given in ("all-linear", "q_v"):
            return given
        raise SpecError(
            f"peft_config.target_modules: {given!r} is a pattern, which is not read; give names, or 'all-linear'"
        )
    return ",".join(sorted(given))
