"""A sweep file (YAML) → a Sweep: its cells in file order, and which of them stay out of the fit.

In: a file as in data/sweeps/, or a name there; its keys are the words of resolve.option_names(). Out: a frozen Sweep,
or a SpecError that names file, block and combination. Never measures, and asks the hub only for a hub id.

    name: quickstart              # the file's name when left out
    description: what it is for
    defaults: {steps: 3}          # option: value, for every block that does not say otherwise
    cells:                        # blocks; option: value or a list, and lists multiply (the last one varies fastest)
      - model: [gpt2, opt-125m]
        method: lora
        lora_targets: q_proj,v_proj     # text; a list means several sets to try: [all-linear, "q_proj,v_proj"]
        batch_size: [1, 4]
        seq_len: [512, 1024]
        exclude:                        # partial matches to leave out
          - {model: opt-125m, batch_size: 4, seq_len: 1024}
        hold_out: true                  # measured, but kept out of the fit
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vramprobe import catalog
from vramprobe.errors import MissingDependency, SpecError, UnknownName, VramprobeError
from vramprobe.options import ADAPTER_OPTIONS
from vramprobe.resolve import option_names, resolve, understood
from vramprobe.spec import CellSpec
from vramprobe.sweep.yaml_file import parsed

if TYPE_CHECKING:
    from vramprobe.lengths.padding import PaddedData

_TOP_KEYS = ("name", "description", "defaults", "cells")
_BLOCK_KEYS = ("exclude", "hold_out")
_REQUIRED = ("model", "method", "batch_size", "seq_len")
_RECIPE_PARTS = ("dtype", "autocast", "lora_dtype")
_QUANT_OPTIONS = ("quant", "kbit_prep")
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Cells in file order, each once; ``held_out``: fingerprints to keep out of the fit; ``notes`` are for the user.

    ``data``: the padding of each cell's batches by its fingerprint, where the sweep was put on a data set (on_data.py).
    """

    name: str
    description: str
    cells: tuple[CellSpec, ...]
    held_out: frozenset[str]
    notes: tuple[str, ...]
    data: Mapping[str, PaddedData] = field(default_factory=dict)


@dataclass(frozen=True)
class _Block:
    where: str  # file and block number, for messages
    values: dict[str, list[Any]]  # what the block itself says
    exclude: list[dict[str, list[Any]]]
    hold_out: bool


def load_sweep(path: str | Path, *, device: str, overrides: dict[str, Any] | None = None) -> Sweep:
    """Read ``path``, or what ships by that name; cells that name no device get ``device``, ``overrides`` win over all.

    Of ``defaults`` and ``overrides``, adapter options reach only cells with adapters and quant and kbit_prep only qlora
    cells; in a block they are meant, and refused where they cannot be. A nearer recipe replaces a farther dtype,
    autocast and lora_dtype. A relative model path starts at the working folder. Cells with the same fingerprint are
    dropped with a note. Raises SpecError, or MissingDependency for a model on a hub that cannot be asked.
    """
    return sweep_of(parsed(catalog.sweep_file(path)), path, device=device, overrides=overrides)


def sweep_of(raw: Any, path: str | Path, *, device: str, overrides: dict[str, Any] | None = None) -> Sweep:
    """The sweep that a file has as its content, read already; ``path`` is its place, for messages and its name."""
    content = _mapping(raw, str(path), "name, defaults and cells")
    _refuse_unknown(content, _TOP_KEYS, str(path), "sweep key")
    defaults = _values(content.get("defaults", {}), f"{path}, defaults")
    for key, several in defaults.items():
        if len(several) > 1:
            raise SpecError(f"{path}, defaults: {key} is a list, and lists multiply only within a block; move it there")
    given = {key: [value] for key, value in (overrides or {}).items() if value is not None}
    _refuse_unknown(given, option_names(), "overrides", "option")
    blocks = content.get("cells")
    if not isinstance(blocks, list) or not blocks:
        raise SpecError(f"{path} has no cells; write `cells:` and under it a list of blocks, each `- model: …`")
    base = {"device": [device]} | defaults
    cells: dict[str, CellSpec] = {}
    held_out: dict[str, bool] = {}
    notes: list[str] = []
    for number, raw in enumerate(blocks, start=1):
        block = _block(raw, f"{path}, block {number}")
        for cell in _cells(block, base, given):
            fingerprint = cell.fingerprint
            first_held_out = held_out.setdefault(fingerprint, block.hold_out)
            if first_held_out != block.hold_out:
                raise SpecError(
                    f"{block.where}: {cell.cell_id} is held out in one block and not in another; keep it in one of them"
                )
            if fingerprint in cells:
                notes.append(f"{block.where}: {cell.cell_id} is in the sweep already; kept once")
            cells.setdefault(fingerprint, cell)
    if not cells:
        raise SpecError(f"{path}: its excludes leave no cell; drop one of them")
    return Sweep(
        name=_name(content.get("name", Path(path).stem), str(path)),
        description=str(content.get("description", "")),
        cells=tuple(cells.values()),
        held_out=frozenset(one for one, out in held_out.items() if out),
        notes=tuple(notes),
    )


def select(
    sweep: Sweep, *, only: str | Sequence[str] = (), skip: str | Sequence[str] = (), shard: str | None = None
) -> Sweep:
    """The part of ``sweep`` whose cell ids match one of ``only`` (all, if empty) and none of ``skip``.

    A pattern is a piece of the id, or a whole one with ``*`` and ``?``. ``shard`` is ``i/n``: every n-th cell, from the
    i-th on, so that n machines share a sweep. Raises SpecError for a pattern that matches nothing and a bad shard.
    """
    only, skip = ([given] if isinstance(given, str) else given for given in (only, skip))
    for pattern in (*only, *skip):
        if not pattern:
            raise SpecError("an empty pattern was given to --only or --skip; it would match every cell")
        if not any(_matches(cell, pattern) for cell in sweep.cells):
            pieces = {piece for cell in sweep.cells for piece in cell.cell_id.split("_")}
            near = UnknownName("cell id or pattern", pattern, pieces)
            raise SpecError(f"{near} A pattern is a piece of an id, or a whole one with * and ?.")
    cells = [cell for cell in sweep.cells if not only or any(_matches(cell, pattern) for pattern in only)]
    cells = [cell for cell in cells if not any(_matches(cell, pattern) for pattern in skip)]
    if shard is not None:
        number, of = _shard(shard)
        cells = cells[number - 1 :: of]
    if not cells:
        raise SpecError(f"no cell of {sweep.name} is left after --only, --skip and --shard; drop one of them")
    return replace(sweep, cells=tuple(cells))


def _matches(cell: CellSpec, pattern: str) -> bool:
    whole = pattern if any(sign in pattern for sign in "*?") else f"*{pattern}*"
    return fnmatch.fnmatchcase(cell.cell_id.lower(), whole.lower())


def _shard(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise SpecError(f"shard {text!r} cannot be; write i/n with i from 1 to n, for instance 2/4")
    return int(match[1]), int(match[2])


def _block(raw: Any, where: str) -> _Block:
    raw = _mapping(raw, where, "options such as model and method")
    hold_out = raw.get("hold_out", False)
    if not isinstance(hold_out, bool):
        raise SpecError(f"{where}: hold_out is {hold_out!r}; write true or false")
    options = {key: value for key, value in raw.items() if key not in _BLOCK_KEYS}
    values = _values(options, where, also=_BLOCK_KEYS)
    excludes = raw.get("exclude", [])
    if not isinstance(excludes, list):
        raise SpecError(f"{where}: exclude is a list of matches, each such as {{model: gpt2, seq_len: 2048}}")
    exclude = [_values(match, f"{where}, exclude {number}") for number, match in enumerate(excludes, start=1)]
    return _Block(where, values, exclude, hold_out)


def _cells(block: _Block, base: dict[str, list[Any]], overrides: dict[str, list[Any]]) -> list[CellSpec]:
    values = _closest(_closest(base, block.values), overrides)
    for key in _REQUIRED:
        if key not in values:
            raise SpecError(f"{block.where} names no {key}; add it to the block or to defaults")
    for match in block.exclude:
        for key in match.keys() - values.keys():
            raise SpecError(f"{block.where}, exclude: the block sets no {key}, so no combination can match it")
    used = [False] * len(block.exclude)
    cells = []
    for combination in itertools.product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        hits = [all(options[key] in several for key, several in match.items()) for match in block.exclude]
        used = [before or hit for before, hit in zip(used, hits, strict=True)]
        if not any(hits):
            cells.append(_cell(block, options, varying=[key for key in values if len(values[key]) > 1]))
    for number, hit in enumerate(used, start=1):
        if not hit:
            raise SpecError(f"{block.where}: exclude {number} matches no combination; mend or delete it")
    return cells


def _closest(far: dict[str, list[Any]], near: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """``far`` with ``near`` over it, in near's order; a nearer recipe replaces the farther knobs that it stands for."""
    replaced = (*near, *_RECIPE_PARTS) if "recipe" in near else tuple(near)
    return {key: value for key, value in far.items() if key not in replaced} | near


def _cell(block: _Block, options: dict[str, Any], varying: list[str]) -> CellSpec:
    method = options["method"]
    not_taken = ADAPTER_OPTIONS + _QUANT_OPTIONS if method == "full" else _QUANT_OPTIONS if method == "lora" else ()
    words = {key: value for key, value in options.items() if key in block.values or key not in not_taken}
    try:
        return resolve(**words)
    except VramprobeError as error:
        combination = ", ".join(f"{key}={options[key]}" for key in varying)
        kind = MissingDependency if isinstance(error, MissingDependency) else SpecError
        raise kind(f"{block.where}{f' ({combination})' if combination else ''}: {error}") from error


def _values(raw: Any, where: str, also: tuple[str, ...] = ()) -> dict[str, list[Any]]:
    """Option → its values, always as a list; every key known, every value of the option's type."""
    raw = _mapping(raw, where, "options such as model and method")
    _refuse_unknown(raw, [*option_names(), *also], where, "option")
    values = {key: [_understood(key, one) for one in _listed(value)] for key, value in raw.items()}
    for key, several in values.items():
        if not several:
            raise SpecError(f"{where}: {key} is an empty list; give at least one value or leave the option out")
        for value in several:
            _check_type(key, value, where)
        if key == "lora_targets" and len(several) > 1:
            _refuse_single_modules(several, where)
    return values


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _understood(key: str, value: Any) -> Any:
    """The value that is meant; one that is none is as given, for the check of its type to name."""
    with suppress(SpecError):
        return understood(key, value)
    return value


def _check_type(key: str, value: Any, where: str) -> None:
    kind = _option_type(key)
    if type(value) is kind or (kind is float and type(value) is int):
        return
    if value is None:
        hint = "; leave the option out for its default, or write the word none where that is a choice"
    elif isinstance(value, bool):
        hint = "; YAML reads yes, no, on and off as booleans: write none, or put quotes around the word"
    elif key == "lora_targets" and isinstance(value, list):
        hint = "; write one set of modules as q_proj,v_proj"
    else:
        hint = ""
    raise SpecError(
        f"{where}: {key} is {'null' if value is None else repr(value)}; {_EXPECTED[kind]} is expected{hint}"
    )


def _option_type(key: str) -> type:
    """bool, int or float where CellSpec says so; everything else is text in a sweep file."""
    if key not in CellSpec.model_fields:  # recipe
        return str
    annotation = CellSpec.model_fields[key].annotation
    return next((kind for kind in (bool, int, float) if kind is annotation or kind in get_args(annotation)), str)


def _refuse_single_modules(several: list[str], where: str) -> None:
    for value in several:
        if value not in ("all-linear", "q_v") and "," not in value:
            raise SpecError(
                f"{where}: in a list, lora_targets are several sets to try, one cell each; {value!r} is one module. "
                f"For one set write text: lora_targets: {','.join(several)}; to try this module alone write '{value},'"
            )


def _mapping(raw: Any, where: str, of_what: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise SpecError(f"{where} is {type(raw).__name__} {raw!r:.60}; a mapping of {of_what} is expected")
    return raw


def _refuse_unknown(given: dict[Any, Any], known: list[str] | tuple[str, ...], where: str, kind: str) -> None:
    for key in given:
        if key not in known:
            allowed = f"Allowed: {', '.join(known)}."
            raise SpecError(f"{where}: {UnknownName(kind, str(key), known, allowed)}")


def _name(raw: Any, where: str) -> str:
    if not isinstance(raw, str) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", raw):
        raise SpecError(f"{where}: the sweep's name {raw!r} becomes a folder; use letters, digits, '.', '_' and '-'")
    return raw
