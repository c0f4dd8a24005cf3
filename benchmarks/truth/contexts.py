"""CUDA contexts by card, published beside ours: ``python benchmarks/truth/contexts.py`` (contexts.md; ``--check``).

data/contexts.csv has a figure a row; catalog/contexts.py makes the range of a card of them.
"""

import io
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_markdown, filled, write_or_check
from benchmarks.truth import oom
from benchmarks.truth.published_verdicts import card_of
from vramprobe.catalog import find_gpu, list_gpus
from vramprobe.catalog.contexts import Loaded, card_points, context_of, context_rows, left_out_errors, line_of
from vramprobe.catalog.gpus import Gpu
from vramprobe.explain.report import report_of
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, NCCL_ALLOWANCE_BYTES
from vramprobe.units import GIB, KIB, MIB

PAGE = Path(__file__).with_suffix(".md")
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
#: Messages of one process of several, whose repetition as a cell is of one (the threads say so).
_OF_SEVERAL = ("PrimeIntellect-ai/verifiers#106", "axolotl-ai-cloud/axolotl#1717 (load)")


def page() -> str:
    """The whole page."""
    most = max(gpu.context_bytes or 0 for gpu in list_gpus()) / GIB
    return filled(
        PAGE,
        size=f"{CONTEXT_ALLOWANCE_BYTES / GIB:.0f}",
        most=f"{most:.2f}",
        checked=_checked(),
        step=_by_card("step"),
        start=_by_card("start"),
        rows=_rows(),
        messages=_messages(),
        left_out=_left_out(),
    )


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
    return as_markdown(head, "lllrrlrr", table)


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
    return as_markdown(["card", "published, MiB", "ours, MiB", "why it is no row", "source"], "lrrll", table)


def main() -> None:
    write_or_check({PAGE: page()}, "truth/contexts.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
