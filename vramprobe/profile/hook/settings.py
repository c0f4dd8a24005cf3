"""Settings that decide a run's memory: those of its live models, and the arguments of transformers' Trainer.

In: modules that train, a TrainingArguments. Out: name → text, a library's defaults too. No path, no secret, nothing
that only says where a run logs.
"""

import enum

_NO_SETTING = ("dir", "path", "hub", "token_id", "run_name", "seed", "report", "log", "key", "url", "project")


def of_models(modules):
    """Settings of the models among ``modules``; a parameter that two of them have counts once."""
    parameters = {id(one): one for module in modules for one in module.parameters()}.values()
    parts = [part for module in modules for part in module.modules()]
    attention = {str(getattr(getattr(one, "config", None), "_attn_implementation", None)) for one in parts} - {"None"}
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    return {
        "parameters": f"{sum(one.numel() for one in parameters):,}, {trained:,} trained",
        "dtypes of parameters": ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in parameters})),
        "layers checkpointed": str(sum(bool(getattr(one, "gradient_checkpointing", False)) for one in parts)),
        "attention": ", ".join(sorted(attention)),
    }


def of_arguments(args):
    """The arguments of a Trainer that are numbers or words."""
    found = {}
    for name, value in vars(args).items():
        value = value.value if isinstance(value, enum.Enum) else value
        is_plain = value is None or isinstance(value, (bool, int, float, str))
        if is_plain and not name.startswith("_") and not any(word in name for word in _NO_SETTING):
            found[name] = str(value)
    return found
