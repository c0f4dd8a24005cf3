"""Bases of what is handed out or written to files: frozen, without unknown fields, and, where fitted, finite.

In: nothing. Out: pydantic models whose schema is built at their first use.
"""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Base of what is handed out or written to files: no field can be changed, and none is unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def to_json_line(self) -> str:
        """One line of JSON, without the newline."""
        return self.model_dump_json()


class FiniteModel(FrozenModel):
    """Base of fitted values: none is infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)
