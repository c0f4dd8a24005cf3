"""torch's own memory snapshot → flat arrays in a file: what the allocator did, in order, and which line asked.

In: the dict of ``torch.cuda.memory._snapshot()`` under ``_record_memory_history``. Out: a dict of builtins and arrays
for one device, and a file of it, whole or not at all. Stdlib alone: it runs in processes of others.
"""

import contextlib
import os
import pickle
from array import array

#: Words of device_traces → numbers of ``actions``; a ``snapshot`` does nothing to memory and is left out.
_WORDS = "alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap oom"
ACTIONS = {word: number for number, word in enumerate(_WORDS.split())}
_ROUNDING_BYTES = 512


def compact(snapshot, device, hidden=()):
    """One device's history as arrays of one length, one value per event, and its stacks, each once.

    ``sizes`` are requested bytes; for segments what was taken from the device. ``stacks``: frames innermost first, as
    (file, line, function). ``alive_before``: (address, bytes, requested bytes, stack) of what was allocated before the
    first event. ``hidden``: folders whose frames are left out. Events are read once; 2 million take some seconds.
    """
    traces = snapshot["device_traces"]
    kept = [entry for entry in (traces[device] if device < len(traces) else ()) if entry["action"] in ACTIONS]
    stacks = _Stacks(hidden)
    actions = array("b", [ACTIONS[entry["action"]] for entry in kept])
    addresses = array("Q", [entry.get("addr", 0) for entry in kept])
    sizes = array("q", [entry["size"] for entry in kept])
    numbers = array("i", [stacks.number(entry.get("frames")) for entry in kept])
    before = _alive_before(snapshot, device, actions, addresses, sizes, stacks)
    return {
        "device": device,
        "actions": actions,
        "addresses": addresses,
        "sizes": sizes,
        "times_us": array("q", [entry.get("time_us", 0) for entry in kept]),
        "streams": array("Q", [entry.get("stream", 0) for entry in kept]),
        "stacks_of": numbers,
        "stacks": list(stacks.known),
        "alive_before": before,
        "allocator": {"alloc_conf": snapshot.get("allocator_settings", {}).get("PYTORCH_CUDA_ALLOC_CONF")},
    }


def write(compacted, path):
    """Write the history to ``path``: all of it, or, where that fails, nothing. Raises OSError."""
    path = os.fspath(path)
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            pickle.dump(compacted, file, protocol=4)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


class _Stacks:
    """Stacks in the order in which they were first seen. torch hands out one list for all events of one traceback."""

    def __init__(self, hidden):
        self.known, self._by_list, self._hidden = {}, {}, hidden

    def number(self, frames):
        """The position of this stack in ``known``; -1 for none."""
        if not frames:
            return -1
        number = self._by_list.get(id(frames))
        if number is None:
            stack = tuple(
                (frame["filename"], frame["line"], frame["name"])
                for frame in frames
                if not frame["filename"].startswith(self._hidden)
            )
            number = self._by_list[id(frames)] = self.known.setdefault(stack, len(self.known))
        return number


def _alive_before(snapshot, device, actions, addresses, sizes, stacks):
    """Blocks at the end that no event made, and those that an event freed and none made."""
    found, made = {}, set()
    alloc, freed = ACTIONS["alloc"], ACTIONS["free_requested"]
    for action, address, size in zip(actions, addresses, sizes, strict=True):
        if action == alloc:
            made.add(address)
        elif action == freed and address not in made and address not in found:
            found[address] = (address, -(-size // _ROUNDING_BYTES) * _ROUNDING_BYTES, size, -1)
    for segment in snapshot["segments"]:
        if segment.get("device", 0) != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] == "active_allocated" and address not in made and address not in found:
                number = stacks.number(block.get("frames"))
                found[address] = (address, block["size"], block["requested_size"], number)
            address += block["size"]
    return sorted(found.values())
