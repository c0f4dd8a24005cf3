"""GRPO's reward: as many points as there are characters."""


def length(completions, **_):
    return [float(len(completion)) for completion in completions]
