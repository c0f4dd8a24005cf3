"""A line of a log → the message of an out-of-memory error in it, and the message's text → its figures in bytes.

In: text, and the forms of data/messages.toml: who writes a message, whose memory was full, and where its figures stand.
Out: an OomMessage. A figure that the text lacks is None. Adding a form is one table there.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, NamedTuple

from vramprobe.catalog import list_gpus
from vramprobe.catalog.shipped import data_file
from vramprobe.units import GIB, KIB, MIB, format_bytes

Owner = Literal["device allocator", "driver", "engine", "kernel", "shared memory", "host"]
_UNITS = {"K": KIB, "M": MIB, "G": GIB, "T": 1024 * GIB, "B": 1, "b": 1}  # by first letter; all are 1024-based
_AMOUNT = r"-?\d[\d,]{0,30}(?:\.\d{0,12})? ?(?:bytes|[kKMGT]i?B|[KMGT]\b|B\b)"
_PLACE = re.compile(r"\{(?:(\w+):)?([a-z]\w*)\}")  # {requested}, {GiB:free}, {text:device}
_INSIDE = {"text": r"[\w.,%-]*\w", "int": r"\d{1,18}"}  # what is kept as text
#: Less than this is the rounding of three amounts that are printed to 0.01 GiB.
ROUNDING_BYTES = 32 * MIB
#: More than any GPU has: WSL's driver reports a process of 2**64 bytes. Only a request may be larger.
ABSURD_BYTES = 2**50
#: Totals in GiB of machines whose CPU and GPU share one memory, which the catalog lacks, by backend; no GPU with memory
#: of its own prints these. Jetson AGX Orin and Thor by their logs; Strix Halo with 128 GB
#: (kyuz0/amd-strix-halo-image-video-toolboxes#3, noamsto/nix-amd-ai#42).
_SHARED_GIB = {"CUDA": (61.37, 122.82), "HIP": (128.0, 96.0)}
_PRINTED_TO = 0.02  # of one GPU's total, as systems report it
_OTHER = re.compile(rf"Process \d+ has ({_AMOUNT}) memory in use")


class Form(NamedTuple):
    """One form of message; data/messages.toml says what each field means."""

    program: str
    owner: Owner
    words: tuple[str, ...]
    pattern: str = ""
    fields: tuple[str, ...] = ()
    ends: str = ""
    backend: str = ""
    cause: str = ""
    phase: str = ""
    is_probable: bool = False
    why: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OomMessage:
    """One error. Bytes as printed, which is to 0.01 of the unit; None where the message does not say."""

    backend: str  # CUDA, HIP, XPU, NPU, MPS, Metal, TPU, or host
    program: str = "PyTorch"
    owner: Owner = "device allocator"  # of the memory that was full
    device: int | None = None
    requested: int | None = None
    requested_half_unit: int = 0  # half of the printed amount's last digit, bytes
    total: int | None = None
    free: int | None = None
    used: int | None = None  # of the host or the job
    allowed: int | None = None  # set_per_process_memory_fraction, MPS's watermark, an engine's share
    process: int | None = None  # this process by the driver: reserved, context and libraries
    allocated: int | None = None
    private_pools: int | None = None
    unused: int | None = None  # reserved and not allocated
    outside_allocator: int | None = None  # MPS: Metal memory of this process outside PyTorch's allocator
    others: tuple[int, ...] = ()  # other processes on the GPU, as the driver names them
    shares_host_memory: bool = False  # the GPU has no memory of its own: ``total`` is the machine's
    has_figures: bool = True
    is_cut: bool = False  # the text ends before the message does
    facts: tuple[tuple[str, str], ...] = ()  # what else the message says, by name

    @property
    def reserved(self) -> int | None:
        """Bytes of the allocator's segments."""
        return None if self.allocated is None or self.unused is None else self.allocated + self.unused

    @property
    def outside(self) -> int | None:
        """Bytes of this process outside PyTorch's allocator; with other processes where no figure separates them."""
        if self.outside_allocator is not None:
            return self.outside_allocator
        if self.reserved is None:
            return None
        if self.process is not None:
            return max(self.process - self.reserved, 0)
        if self.total is None or self.free is None:
            return None
        return max(self.total - self.free - sum(self.others) - self.reserved, 0)

    @property
    def neighbors(self) -> int | None:
        """Bytes of other processes, where the message tells them apart from this one."""
        if self.others:
            return sum(self.others)
        if self.owner != "device allocator" or self.process is None or self.total is None or self.free is None:
            return None
        size = self.total - self.free - self.process
        return size if size > ROUNDING_BYTES else 0

    def filled(self, sentence: str) -> str | None:
        """``sentence`` with this error's figures in its {places}; None where one of them is not known."""
        known = dict(self.facts) | {
            one.name: format_bytes(size)
            for one in fields(self)
            if isinstance(size := getattr(self, one.name), int) and not isinstance(size, bool)
        }
        names = re.findall(r"\{([a-z_]+)\}", sentence)
        if not known.keys() >= set(names):
            return None
        for name in names:
            sentence = sentence.replace(f"{{{name}}}", known[name])
        return sentence


@cache
def forms() -> tuple[Form, ...]:
    """All forms, in the order in which they are tried."""
    table = tomllib.loads(data_file("messages.toml").read_text(encoding="utf-8"))
    return tuple(_form(row, table["fields"]) for row in table["message"])


def _form(row: Mapping[str, Any], shared: Mapping[str, list[str]]) -> Form:
    given = row.get("fields", ())
    patterns = shared[given] if isinstance(given, str) else given
    words: dict[str, Any] = {**row, "fields": tuple(_PLACE.sub(_group, pattern) for pattern in patterns)}
    return Form(**words | {name: tuple(row[name]) for name in ("words", "why", "changes") if name in row})


def _group(place: re.Match[str]) -> str:
    unit, name = place[1], place[2]
    inside = _AMOUNT if unit is None else _INSIDE.get(unit, r"-?\d[\d,]{0,30}(?:\.\d{0,12})?")
    return f"(?P<{name}{'' if unit is None else f'__{unit}'}>{inside})"


def form_of(line: str) -> Form | None:
    """The form of the message that begins in this line."""
    for form in forms():
        for word in form.words:
            if word in line:
                if not form.pattern or re.search(form.pattern, line):
                    return form
                break
    return None


def is_whole(form: Form, text: str) -> bool:
    """Return True if the last figure that its form has is there."""
    return not form.ends or re.search(form.ends, text) is not None


def parse(form: Form, text: str) -> OomMessage:
    """The figures of a message, of which ``text`` may be only the beginning."""
    text = text[min((at for word in form.words if (at := text.find(word)) >= 0), default=0) :] if form.ends else text
    sizes, facts, half_unit = _read_fields(form, text)
    device = facts.pop("device", "")
    others = tuple(size for match in _OTHER.finditer(text) if (size := _bytes(match[1])) < ABSURD_BYTES)
    allocated = sizes.get("allocated")
    reserved_total, cached = sizes.pop("reserved_total", None), sizes.pop("cached", None)
    if allocated is not None and "unused" not in sizes:
        if reserved_total is not None:
            sizes["unused"] = max(reserved_total - allocated, 0)
        elif cached is not None:
            sizes["unused"] = cached  # PyTorch 1.0 to 1.3: cached beside the allocated
    if "used" in sizes and "total" in sizes:
        sizes["free"] = max(sizes["total"] - sizes["used"], 0)
    is_cut = not is_whole(form, text)
    if not sizes.get("process"):  # 0 bytes in a container, where the driver does not find this process
        sizes.pop("process", None)
        process, others = _in_a_container(others, sizes, is_cut)
        sizes |= {} if process is None else {"process": process}
    backend = form.backend or ("host" if form.owner in ("host", "shared memory") else "CUDA")
    return OomMessage(
        backend=backend,
        program=form.program,
        owner=form.owner,
        device=int(device) if device.isdecimal() else None,
        requested_half_unit=half_unit,
        others=others,
        shares_host_memory=_is_total_shared(backend, sizes.get("total", 0)),
        has_figures=bool(sizes),
        is_cut=is_cut,
        facts=tuple(facts.items()),
        **sizes,
    )


def _read_fields(form: Form, text: str) -> tuple[dict[str, int], dict[str, str], int]:
    """Bytes by field, words by name, and half of the last digit that the request is printed with."""
    sizes: dict[str, int] = {}
    facts: dict[str, str] = {}
    half_unit = 0
    for pattern in form.fields:
        match = re.search(pattern, text)
        for group, amount in match.groupdict().items() if match else ():
            name, _, unit = group.partition("__")
            if amount is None or name in sizes:
                continue
            if unit in _INSIDE:
                facts.setdefault(name, amount)
                continue
            size = _bytes(f"{amount} {unit}")
            if size < ABSURD_BYTES or name == "requested":
                sizes[name] = size
            if name == "requested" and "." in amount:
                half_unit = _bytes(f"1 {unit or amount.lstrip('-0123456789., ')}") // 200
    return sizes, facts, half_unit


def _in_a_container(
    others: tuple[int, ...], found: Mapping[str, int], is_cut: bool
) -> tuple[int | None, tuple[int, ...]]:
    """This process's bytes, and those of the others. In a container the driver knows this process by another number, so
    the message counts it among the others: together with the reserved bytes they are more than what is in use.
    """
    total, free, allocated, unused = (found.get(name) for name in ("total", "free", "allocated", "unused"))
    if allocated is None and is_cut and others:  # the largest may be this process itself
        left = list(others)
        left.remove(max(others))
        return None, tuple(left)
    if total is None or free is None or allocated is None or unused is None:
        return None, others
    reserved = allocated + unused
    own = [size for size in others if size >= reserved - ROUNDING_BYTES]
    if not own or sum(others) + reserved <= total - free + ROUNDING_BYTES:
        return None, others
    left = list(others)
    left.remove(min(own))
    return min(own), tuple(left)


def _is_total_shared(backend: str, total: int) -> bool:
    """Return True where ``total`` bytes are those of a machine whose CPU and GPU share one memory."""
    known = [gpu.total_bytes for gpu in list_gpus() if gpu.shares_host_memory and gpu.total_bytes]
    totals = [*(known if backend == "CUDA" else ()), *(one * GIB for one in _SHARED_GIB.get(backend, ()))]
    return any(abs(total - one) < _PRINTED_TO * one for one in totals)


def _bytes(amount: str) -> int:
    """Bytes of an amount such as ``1.95 GiB``; without a unit they are bytes."""
    number = re.match(r"-?[\d.,]+", amount)
    assert number is not None
    unit = amount[number.end() :].strip()[:1].upper() or "B"
    return round(min(float(number[0].replace(",", "")), 1e30) * _UNITS[unit])
