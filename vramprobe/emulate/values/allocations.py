"""Two runs' sequences of allocations: equal, or the first place where they part. What ``--verify`` asks.

In: snapshots of torch's allocator (``torch.cuda.memory._snapshot()``) with their history. Out: events, a parting as
plain dicts. Addresses count only as names: two runs may get other ones. It runs no model and needs no
torch for what is recorded already.
"""

from contextlib import contextmanager

from .reads import is_the_programs, place_of

ACTIONS = ("alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom")
MAX_EVENTS = 1_000_000


@contextmanager
def recorded():
    """Within: torch keeps every allocation's history, with Python frames; yields a function that gives the events so
    far."""
    import torch

    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=MAX_EVENTS)
    try:
        yield lambda device=0: events(torch.cuda.memory._snapshot(), device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def events(snapshot, device=0):
    """One device's history as [{action, num_bytes, block, frames}]: ``block`` numbers allocations in their order."""
    traces = snapshot["device_traces"]
    numbers, found, count = {}, [], 0
    for entry in traces[device] if device < len(traces) else []:
        action = entry["action"]
        if action not in ACTIONS:
            continue
        key = (action.startswith("segment"), entry.get("addr", entry.get("device_free")))
        if action in ("alloc", "segment_alloc", "segment_map"):
            numbers[key], count = count, count + 1
        found.append(
            {
                "action": action,
                "num_bytes": entry["size"],
                "block": numbers.get(key),
                "frames": [f"{at['filename']}:{at['line']}" for at in entry.get("frames", ())],
            }
        )
    return found


def _same(event):
    """Return what two sequences are compared by; the frames do not count."""
    return event["action"], event["num_bytes"], event["block"]


def parting(first, second):
    """None where two sequences are equal, else {index, first, second, num_first, num_second}: the first event that
    differs.

    Where one is the beginning of the other, the shorter one's event is None.
    """
    shared = min(len(first), len(second))
    index = next((at for at in range(shared) if _same(first[at]) != _same(second[at])), shared)
    if index == len(first) == len(second):
        return None
    return {
        "index": index,
        "first": first[index] if index < len(first) else None,
        "second": second[index] if index < len(second) else None,
        "num_first": len(first),
        "num_second": len(second),
    }


def verdict(contents, sequences):
    """{contents, num_events, same, parted_at}: whether what was recorded under each of ``contents`` is one sequence."""
    parted = next((found for one in sequences[1:] if (found := parting(sequences[0], one))), None)
    return {
        "contents": list(contents),
        "num_events": len(sequences[0]),
        "same": parted is None,
        "parted_at": parted and f"event {parted['index']}: {_said(parted['first'])}, against {_said(parted['second'])}",
    }


def _said(event):
    if event is None:
        return "nothing more"
    line = next((f" at {place_of(frame)}" for frame in event["frames"] if is_the_programs(frame)), "")
    return f"{event['action']} of {event['num_bytes']} B{line}"
