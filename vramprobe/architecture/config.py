"""Reading a config.json key by key, with its checks and defaults.

In: a config.json as a mapping. Out: checked values, or a VramprobeError that names the key. Never decides a family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vramprobe.architecture.parts import UnsupportedArchitecture
from vramprobe.errors import VramprobeError

#: More layers than any model has, and few enough to look at each.
MOST_LAYERS = 100_000
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


class Config:
    """A config.json whose values are checked as they are read; an error says the key, what it is and what it may be.

    A default is what transformers' own config class has for an absent key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.model_type = values, values.get("model_type")
        self._text = repr(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def size(self, key: str, default: int | None = None) -> int:
        """A count or a width; null means the default, and without one the key must be there."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise VramprobeError(
                f"the {self.model_type} config.json has no {key!r}; it is needed to count memory: a whole number of 1 "
                "or more"
            )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number of 1 or more")
        if key in _DEPTHS and value > MOST_LAYERS:
            raise self.wrong(key, f"a whole number up to {MOST_LAYERS:,}")
        return value

    def absent_or_size(self, key: str, default: int | None) -> int | None:
        """A size that null switches off; the default is for an absent key."""
        return None if self.values.get(key, default) is None else self.size(key, default)

    def count(self, key: str, default: int) -> int:
        """A number of something that may be missing; the default is for an absent key."""
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, "a whole number of 0 or more")
        return value

    def rate(self, key: str, default: float) -> float:
        """A probability or a share."""
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise self.wrong(key, "a number from 0 to 1")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A yes or no; null counts as no, as in the models' own code."""
        value = self.values.get(key, default)
        if not isinstance(value, bool | None):
            raise self.wrong(key, "true or false")
        return bool(value)

    def part(self, key: str) -> Config:
        """The config nested under this key, empty where there is none."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Config({"model_type": self.model_type, **value})

    def length(self, key: str, default: list[Any]) -> int:
        """Number of items of a list."""
        value = self.values.get(key, default)
        if not isinstance(value, list):
            raise self.wrong(key, "a list")
        return len(value)

    def not_counted(self, text: str) -> UnsupportedArchitecture:
        """An error for a kind of this family that is not counted here."""
        return UnsupportedArchitecture(
            f"{self.model_type} with {text} is not counted here; vramprobe predict records a step of it"
        )

    def require(self, key: str, value: Any) -> None:
        """Raise where a key has another value than ``value``, which an absent or null key means."""
        given = self.values.get(key)
        if isinstance(value, bool):
            given = self.flag(key, value)
        if given is not None and given != value:
            raise self.not_counted(f"{key} {json.dumps(given)}")

    def require_multiple(self, key: str, other: str, value: int, divisor: int) -> None:
        """Raise unless ``value``, of this key, is a multiple of ``divisor``, of the other."""
        if value % divisor:
            raise VramprobeError(
                f"the {self.model_type} config.json has {key} {value} and {other} {divisor}; {key} must be a multiple "
                f"of {other}"
            )

    def wrong(self, key: str, allowed: str) -> VramprobeError:
        """An error for a value that this key cannot have."""
        given = repr(self.values.get(key))
        given = given if len(given) <= 60 else f"{given[:60]}…"
        return VramprobeError(f"the {self.model_type} config.json has {key} {given}; it must be {allowed}")
