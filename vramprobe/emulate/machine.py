"""An emulated machine: a folder that names its cards, as Python sees it.

In: the cards' properties and the policy for values. Out: ``machine.txt``, which the driver reads; ``events.jsonl``,
read back as frozen data. Never loads the driver; its processes share ``state``, which nothing here reads.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from vramprobe.emulate.cards import MAX_CARDS, CardProperties
from vramprobe.errors import SpecError, StoreError
from vramprobe.units import KIB, MIB

FORMAT = 1
#: Each instance of a CUDA graph and each of its nodes, as learnt from published logs of vLLM on an H100, half of which
#: were held out (benchmarks/rollouts/graphs.md); elsewhere an assumption, as the records say.
ASSUMED_GRAPH_BYTES, ASSUMED_GRAPH_NODE_BYTES = 190 * KIB, 13 * KIB
Fill = Literal["zeros", "ones", "random", "keep"]

#: What ``machine.txt`` says of a card in lines of their own: its numbers, in the order of CardProperties.
_CARD_KEYS = tuple(
    field.name for field in fields(CardProperties) if field.name not in ("gpu", "name", "compute_capability", "source")
)


@dataclass(frozen=True, kw_only=True)
class MachinePolicy:
    """Policy of the whole machine: values nobody computed, copies, collectives, traces."""

    context_bytes: int = 0  # charged to a card by each process that uses it; cards.context_bytes knows a card's
    graph_bytes: int = ASSUMED_GRAPH_BYTES  # charged by each instance of a CUDA graph
    graph_node_bytes: int = ASSUMED_GRAPH_NODE_BYTES  # and by each node of it
    fill: Fill = "zeros"  # what the host reads where nobody computed
    fill_seed: int = 0
    copy_max_bytes: int = 4 * MIB  # larger copies to a device move nothing
    collective_max_bytes: int = 256 * 1024  # larger payloads are not moved
    collective_timeout_seconds: int = 600
    trace: int = 0
    driver_version: int = 13000  # the newest CUDA that the driver serves


@dataclass(frozen=True, kw_only=True)
class MachineEvent:
    """Something that must be known of a run, such as ``unknown_function``."""

    kind: str
    name: str
    pid: int
    detail: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


def device_uuid(folder: Path, index: int) -> str:
    """``GPU-…``: its own for every card of every machine, the same at each look."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_URL, f'vramprobe:{folder}:{index}')}"


def write_machine(
    folder: Path, cards: Sequence[CardProperties], policy: MachinePolicy | None = None, **more: Sequence[int]
) -> Path:
    """``folder/machine.txt`` for these cards in NVML's order; returns the folder, made if missing.

    ``more``: by optional key of the driver (``ecc``, ``context_bytes``, ``persisting_l2_bytes`` …) one value a card.
    Raises SpecError for a card that its contexts would fill, StoreError where the folder is a machine already.
    """
    policy = policy or MachinePolicy()
    if small := next((card for card in cards if card.total_bytes <= policy.context_bytes), None):
        raise SpecError(
            f"context_bytes is {policy.context_bytes:,}: {small.name} has {small.total_bytes:,} bytes; give less"
        )
    folder = Path(folder).absolute()
    lines = [f"format {FORMAT}", f"num_devices {len(cards)}"]
    lines += [f"{key} {value}" for key, value in vars(policy).items()]
    for index, card in enumerate(cards):
        major, minor = card.compute_capability
        lines += [f"device {index}", f"name {card.name}", f"uuid {device_uuid(folder, index)}"]
        lines += [f"pci_bus_id 0000:{index + 1:02X}:00.0", f"compute_capability {major}.{minor}"]
        lines += [f"{key} {getattr(card, key)}" for key in _CARD_KEYS]
        lines += [f"{key} {values[index]}" for key, values in more.items()]
    path = folder / "machine.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError:
        raise StoreError(f"{path} exists: a machine is written once; give another folder or remove this one") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error.strerror}; give a folder that can") from None
    return folder


def read_machine(folder: Path) -> tuple[int, MachinePolicy]:
    """Read the number of cards in ``folder/machine.txt``, and the policy it was written with. Raises StoreError."""
    path = Path(folder, "machine.txt")
    try:
        lines = [line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; name a folder that write_machine made") from None
    kinds = {name: type(value) for name, value in vars(MachinePolicy()).items()}
    said = {key: kinds[key](value) for key, _, value in lines if key in kinds and value}
    num_devices = next((value for key, _, value in lines if key == "num_devices"), "")
    if not num_devices.isdecimal() or not 1 <= int(num_devices) <= MAX_CARDS:
        raise StoreError(f"{path} does not say num_devices, 1 to {MAX_CARDS}; make the machine anew")
    return int(num_devices), MachinePolicy(**said)


def read_events(folder: Path) -> list[MachineEvent]:
    """``events.jsonl`` in order; empty where nothing had to be said. Raises StoreError for a line that is none."""
    path = Path(folder, "events.jsonl")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    events = []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            kind, name, pid = data.pop("kind"), data.pop("name"), int(data.pop("pid"))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreError(
                f"{path}, line {number} is no event: {line[:80]!r}; the machine's folder is damaged"
            ) from None
        events.append(MachineEvent(kind=kind, name=name, pid=pid, detail=data.pop("detail", ""), more=data))
    return events
