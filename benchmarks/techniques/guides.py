"""The 41 GB that guides quote for QLoRA of 70B, beside emulated runs of it.

In: the journal's entries by fingerprint. Out: lines of techniques.md.
"""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.tables import as_markdown
from benchmarks.techniques.runs import fingerprint
from vramprobe.techniques.registry import bases, techniques
from vramprobe.units import GIB

SOURCE = "https://unsloth.ai/docs/get-started/fine-tuning-for-beginners/unsloth-requirements"
SETTINGS = "https://github.com/unslothai/unsloth"
QUOTED = 41
#: What is held against it: base and techniques, from the settings that Unsloth publishes down to the least.
RUNS = (
    ("qlora-70b-unsloth", ()),
    ("qlora-70b", ()),
    ("qlora-70b", ("nf4_double", "adamw_bnb_8bit")),
    ("qlora-70b", ("nf4_double", "adamw_bnb_8bit", "liger", "checkpoint_offload")),
)


def lines(entries: dict[str, dict[str, Any]]) -> list[str]:
    """The section, as far as its runs are there."""
    runs = [(base, [techniques()[name] for name in names]) for base, names in RUNS]
    found = [(base, several, entries.get(fingerprint(bases()[base], several))) for base, several in runs]
    done = [(base, several, own) for base, several, own in found if own is not None and own["outcome"] == "ok"]
    if not done:
        return []
    rows, num_gb, num_gib = [], 0, 0
    for base, several, own in done:
        peak = own["peak"]["allocated_bytes"]
        name = " + ".join([bases()[base].text, *(one.name for one in several)])
        num_gb += peak <= QUOTED * 1e9
        num_gib += peak <= QUOTED * GIB
        on_device = own["peak"]["device_bytes"]
        numbers = (own["phases"]["load"][0] / GIB, peak / GIB, peak / 1e9, on_device / GIB)
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    least = min(done, key=lambda one: one[2]["peak"]["allocated_bytes"])[2]
    head = ["run, emulated", "loaded, GiB", "peak, GiB", "peak, GB", "peak of the device, GiB"]
    said = (
        f"[Unsloth's requirements]({SOURCE}) give {QUOTED} GB as the absolute minimum for QLoRA of 70B, without batch, "
        f"length or rank; [its README]({SETTINGS}) tests with a batch of 2, 4 accumulation steps and rank 32. "
        "Unsloth's own kernels did not run here: these are transformers, peft and bitsandbytes. Liger's loss without "
        "logits and checkpoints kept on the host stand for what Unsloth does by kernels of its own. "
        f"Of {len(rows)} runs, {num_gb} stay within {QUOTED} GB and {num_gib} within {QUOTED} GiB, by the allocated "
        "peak."
    )
    return [
        "",
        f"## QLoRA of 70B: the {QUOTED} GB that guides quote",
        "",
        *textwrap.wrap(said, 120, break_long_words=False, break_on_hyphens=False),
        "",
        *as_markdown(head, "lrrrr", rows),
        "",
        "The least of them:",
        "",
        "```",
        f"vramprobe profile --emulate H100-SXM --empty-weights --steps-only -- {least['command']}",
        "```",
    ]
