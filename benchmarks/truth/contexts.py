"""CUDA contexts by card, published beside ours: ``python benchmarks/truth/contexts.py`` (contexts.md; ``--check``).

data/contexts.csv has a figure a row; catalog/contexts.py makes the range of a card of them.
"""

from __future__ import annotations

import io
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_markdown, write_or_check
from benchmarks.truth import oom
from benchmarks.truth.published_verdicts import card_of
from vramprobe.catalog import find_gpu, list_gpus
from vramprobe.catalog.contexts import Loaded, card_points, context_of, context_rows, left_out_errors, line_of
from vramprobe.catalog.gpus import Gpu
from vramprobe.explain.report import report_of
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, NCCL_ALLOWANCE_BYTES
from vramprobe.units import GIB, KIB, MIB

PAGE = Path(__file__).with_suffix(".md")
_LOADED: dict[Loaded, str] = {"step": "after a training step", "start": "at the start: a context, no kernel has run"}
#: Figures of processes that are left out of the table: (MiB, card, why, source).
_LEFT_OUT = (
    (367, "V100-16GB-SXM", "one of eight processes, NCCL within", "meta-llama/llama#918"),
    (709, "RTX-3090", "old message: total less free, other processes within; before lazy loading", "lit-llama#137"),
    (1007, "H100-SXM", "the trainer of several processes, NCCL within", "PrimeIntellect-ai/verifiers#106"),
    (1090, "T4", "before lazy loading", "rmihaylov/falcontune#31"),
    (1288, "A100-80GB-SXM", "old message: total less free, other processes within", "OpenMOSE/RWKV5-LM-LoRA#2"),
    (1597, "A100-40GB-SXM", "torch 2.0.0, before lazy loading", "LianjiaTech/BELLE#257"),
    (1828, "A100-80GB-SXM", "fms-hf-tuning of 2025-02 (reproduce.md): unexplained", "fms-acceleration"),
)
_HEAD = """# The CUDA context, by card

Memory of a card that a process takes beside what torch reserves: driver structures, stacks of the threads that the
multiprocessors hold, kernels, libraries. An emulation cannot know it. The figures are published by others, but for
the H200's, which this project measured (benchmarks/gpu/h200). A verdict (`predict`, `recommend`) sets the upper end
of a card's range aside, with the part that the driver keeps (what nvidia-smi reports less what CUDA sees): the last
column of the tables. An emulated GPU charges the middle of its card's range. `--gpu 12GiB` names no card: {size:.0f}
GiB is set aside, more than any card's context (at most {most:.2f} GiB), and an emulated GPU of that size charges an
A100's.

{checked}

The H200 was measured after the lines had been drawn through the published cards: 524 MiB expected and 526.8 measured at
the start, 629 expected and 763.6 measured after a step, above the expected range (531 to 727). Its cuBLAS takes 66 MiB
and 64 more for the handle of autograd's thread, in kernels and state outside torch.

Rebuild: `python benchmarks/truth/contexts.py`. A new figure is one more row of `vramprobe/data/contexts.csv`; measured
rows of a card take the place of its published ones.

"""


#: Messages of one process of several, whose repetition as a cell is of one (the threads say so).
_OF_SEVERAL = ("PrimeIntellect-ai/verifiers#106", "axolotl-ai-cloud/axolotl#1717 (load)")
_MESSAGES = """The reports of [oom.md](oom.md) whose message tells what the process had: that less what torch
reserved. Those of one GPU are rows above but for the H100's, which is none, so that it shows what a card without one
gets. Several: one of several processes, with NCCL; the two that take more than a verdict sets aside are FSDP and
ZeRO-3 on eight cards, unexplained. What CUDA sees of a card differs by driver: up to 0.08 GiB less than the catalog
says here; *fits* leaves 5 % of the card, which is more."""


def page() -> str:
    """The whole page."""
    most = max(gpu.context_bytes or 0 for gpu in list_gpus()) / GIB
    lines = [_HEAD.format(size=CONTEXT_ALLOWANCE_BYTES / GIB, most=most, checked=_checked())]
    for loaded, words in _LOADED.items():
        lines += [f"## {words.capitalize()}", "", *_by_card(loaded), ""]
    lines += ["## Every figure", "", *_rows(), ""]
    lines += ["## Messages of runs that ran out", "", *_messages(), ""]
    lines += ["## Figures left out", "", *_left_out(), ""]
    return "\n".join(lines)


def _by_card(loaded: Loaded) -> list[str]:
    points, errors = card_points(loaded), left_out_errors(card_points(loaded))
    base, slope = line_of(list(points.values()))
    sizes = sorted(map(abs, errors.values()))
    lines = [
        f"The line through these {len(points)} cards: {base:.0f} MiB and {slope * KIB:.2f} KiB for each thread that "
        f"the multiprocessors hold. Each card predicted by the line of all others: "
        f"{100 * statistics.median(sizes):.1f} % off in the median, {100 * sizes[-1]:.1f} % at most.",
        "",
    ]
    table = []
    for name, (threads, mib) in sorted(points.items(), key=lambda item: item[1]):
        context = context_of(name)
        assert context is not None
        ours = f"{context.low_bytes / MIB:.0f} to {context.high_bytes / MIB:.0f}"
        found = [row.mib for row in context_rows() if (row.gpu, row.loaded) == (name, loaded)]
        said = f"{min(found):g} to {max(found):g}" if len(set(found)) > 1 else f"{mib:g}"
        left_out = f"{mib * (1 + errors[name]):.0f}"
        table.append(
            [find_gpu(name).short_name, f"{threads // 1024}k", said, left_out, f"{100 * errors[name]:+.1f}"]
            + ([ours] if loaded == "step" else [])
            + [context.basis, f"{_aside(find_gpu(name)) / GIB:.2f}"]
        )
    head = ["card", "threads", "published, MiB", "by the other cards, MiB", "error, %"]
    more = (["after a step, MiB"], "r") if loaded == "step" else ([], "")
    last = ["after a step by", "a verdict sets aside, GiB"]
    return lines + as_markdown(head + more[0] + last, "lrrrr" + more[1] + "lr", table)


def _aside(gpu: Gpu) -> int:
    """Bytes of what nvidia-smi reports that a verdict on one GPU sets aside."""
    assert gpu.total_bytes is not None
    assert gpu.cuda_total_bytes is not None
    assert gpu.context_bytes is not None
    return gpu.total_bytes - gpu.cuda_total_bytes + gpu.context_bytes


def _checked() -> str:
    """Count the figures of the table that are no more than a verdict sets aside for the context."""
    within = [row for row in context_rows() if row.mib * MIB <= (find_gpu(row.gpu).context_bytes or 0) + KIB]
    more = sorted({row.board for row in context_rows()} - {row.board for row in within})
    said = f"{len(within)} of the {len(context_rows())} figures below are no more than a verdict's context of that card"
    return f"{said}{': more on ' + ', '.join(more) if more else ''}."


def _messages() -> list[str]:
    """Hold every message that tells a process's memory against what a verdict sets aside."""
    table = []
    for report in oom.reports():
        found, gpu = report_of(io.BytesIO(report["text"].encode())).oom, card_of(report.get("gpu", ""))
        if found is None or gpu is None or found.process is None or found.outside is None or found.total is None:
            continue
        is_one = report["cell"].get("num_gpus", 1) == 1 and report["source"] not in _OF_SEVERAL
        charge = (gpu.context_bytes or 0) + (0 if is_one else NCCL_ALLOWANCE_BYTES)
        amounts = (found.outside, charge, found.total, gpu.cuda_total_bytes or 0)
        outside, ours, total, seen = (f"{size / GIB:.2f}" for size in amounts)
        enough = "yes" if found.outside <= charge + GIB // 100 else "no"
        table.append(
            [report["source"], gpu.short_name, "one" if is_one else "several", outside, ours, enough, total, seen]
        )
    head = ["report", "card", "GPUs", "outside torch, GiB", "context and NCCL of a verdict, GiB", "enough"]
    head += ["CUDA's total in the message, GiB", "in the catalog, GiB"]
    return [_MESSAGES, "", *as_markdown(head, "lllrrlrr", table)]


def _rows() -> list[str]:
    table = [
        [row.board, row.loaded, f"{row.mib:g}", row.driver or "–", row.libraries, row.what, row.grade, row.source]
        for row in context_rows()
    ]
    return as_markdown(["board", "", "MiB", "driver", "libraries", "what", "grade", "source"], "llrlllll", table)


def _left_out() -> list[str]:
    table = []
    for mib, card, why, source in _LEFT_OUT:
        context = context_of(find_gpu(card).name)
        assert context is not None
        table.append([card, mib, f"{context.value_bytes / MIB:.0f}", why, source])
    about = (
        "Before CUDA 11.7 every kernel of torch was loaded at once (1.1 to 1.6 GiB), and old messages of torch count\n"
        "other processes. A run on several GPUs has NCCL's buffers, for which a verdict sets 1.5 GiB aside."
    )
    return [
        about,
        "",
        *as_markdown(["card", "published, MiB", "ours, MiB", "why it is no row", "source"], "lrrll", table),
    ]


def main() -> None:
    write_or_check({PAGE: page()}, "truth/contexts.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
