"""Facts that exact models rest on, checked on this machine: ``python benchmarks/gpu/facts.py FILE.json [cpu|cuda]``.

Most were found on a CPU; each is measured here by cells in processes of their own, or by a probe in one (probes.py).
The file gets one object a fact: what is said, what was expected and found, and whether it holds; null where this device
cannot tell. Exits with 1 if one does not hold: that is a finding, and the file says which.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vramprobe.measure.isolation import new_ticket, run_isolated
from vramprobe.measure.launcher import Server, worker_environment
from vramprobe.records.record import TRAINING_PHASES, PhaseMemory, RunRecord
from vramprobe.spec import resolve

PROBES = Path(__file__).with_name("probes.py")
_CELL_SECONDS, _PROBE_SECONDS = 120.0, 120.0
_RANK, _MODULES = 8, 7
#: Philox seeds, paddings of a log-sum-exp and the like are not in the closed forms.
_TOLERANCE = 0.002


@dataclass(frozen=True, kw_only=True)
class Fact:
    """``expected`` and ``found`` in ``unit``; ``holds`` is null where nothing is expected or nothing could be found."""

    name: str
    says: str
    expected: float | None
    found: float | None
    unit: str
    holds: bool | None
    note: str = ""


@dataclass(frozen=True)
class Size:
    """A small llama: hidden width, MLP width, query and key heads of 64."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    num_layers: int = 2
    vocab: int = 512

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "head_dim": 64,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "num_hidden_layers": self.num_layers,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


SIZES = (Size(256, 704, 4, 2), Size(512, 1280, 8, 2))


class Bench:
    """Runs cells of small models on one device, each in a child of one server."""

    def __init__(self, device: str, scratch: Path) -> None:
        self.device, self._scratch = device, scratch
        self._server = Server(device, None, worker_environment(), ["llama"], scratch / "forkserver.log")

    def __enter__(self) -> Bench:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()

    def run(self, size: Size, **options: Any) -> RunRecord:
        """The cell's record. Raises RuntimeError where it did not end well."""
        folder = self._scratch / f"llama-{size.hidden}-{size.num_layers}-{size.vocab}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(size.config()))
        words = {"batch_size": 2, "seq_len": 256, "timing_steps": 0} | options
        spec = resolve(model=str(folder), device=self.device, **words)
        record = run_isolated(spec, self._server, new_ticket(self._scratch), self._scratch / "log", _CELL_SECONDS)
        if record.outcome.kind != "ok":
            raise RuntimeError(f"{spec.cell_id}: {record.outcome}")
        return record

    def probe(self, name: str) -> dict[str, Any]:
        """What a probe finds in a process of its own."""
        command = [sys.executable, str(PROBES), name]
        done = subprocess.run(command, capture_output=True, text=True, env=worker_environment(), timeout=_PROBE_SECONDS)
        if done.returncode:
            raise RuntimeError(f"probe {name}: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(done.stdout.splitlines()[-1])


def _near(found: float, expected: float, tolerance: float = _TOLERANCE) -> bool:
    return abs(found - expected) <= tolerance * abs(expected)


def _exact_peak(phase: PhaseMemory) -> int:
    """Bytes as they were asked for, where they are known: the caching allocator adds what it did not split off."""
    asked = phase.requested_peak_bytes
    return phase.allocated_peak_bytes if asked is None else asked


def _exact_training_peak(record: RunRecord) -> int:
    return max(_exact_peak(phase) for phase in record.phases if phase.name in TRAINING_PHASES)


def _failed(name: str, error: Exception) -> Fact:
    note = f"{type(error).__name__}: {error}"
    return Fact(name=name, says="the check itself failed", expected=None, found=None, unit="", holds=False, note=note)


# -- saved activations, bytes per token per layer ---------------------------------------------------------------------


@dataclass(frozen=True)
class Widths:
    """What the closed forms are made of, per layer and token; ``params`` and ``lora`` are elements of a layer."""

    h: int
    f: int
    q: int
    kv: int
    n_h: int

    @property
    def attention(self) -> int:
        """Query, key, value and output in 16 bit, and an fp32 log-sum-exp a head."""
        return 2 * (2 * self.q + 2 * self.kv) + 4 * self.n_h

    @property
    def inputs(self) -> int:
        """Widths of the seven linears' inputs."""
        return 5 * self.h + self.q + self.f

    @property
    def params(self) -> int:
        """Elements of the seven linears."""
        return self.h * (2 * self.q + 2 * self.kv + 3 * self.f)

    @property
    def lora(self) -> int:
        """Elements of their adapters."""
        outputs = self.q + 2 * self.kv + self.h + 2 * self.f + self.h
        return _RANK * (self.inputs + outputs)


_LORA = {"method": "lora", "lora_r": _RANK}
_QLORA = {"method": "qlora", "lora_r": _RANK}
#: Name → the cell's options and the closed form; N is the number of tokens.
SAVED: dict[str, tuple[dict[str, Any], Callable[[Widths, int], float]]] = {
    "full, all bf16": ({"method": "full"}, lambda w, n: 16 * w.h + 8 * w.f + w.attention + 8),
    "full, fp32 weights under bf16 autocast": (
        {"method": "full", "recipe": "mixed"},
        lambda w, n: 2 * (8 * w.h + 4) + 10 * w.h + 8 * w.f + w.attention + 2 * w.params / n,
    ),
    "LoRA, bf16 adapters": (
        _LORA | {"autocast": "none", "lora_dtype": "bf16"},
        lambda w, n: 2 * (4 * w.h + 4) + 6 * w.f + w.attention + (4 * w.h + 2 * w.f) + 2 * _RANK * _MODULES,
    ),
    "LoRA, fp32 adapters under autocast": (
        _LORA,
        lambda w, n: 2 * (4 * w.h + 4) + 6 * w.f + w.attention + 2 * w.inputs + 2 * _RANK * _MODULES + 2 * w.lora / n,
    ),
    "LoRA, fp32 adapters, no autocast": (
        _LORA | {"autocast": "none"},
        lambda w, n: 2 * (4 * w.h + 4) + 6 * w.f + w.attention + 4 * w.inputs + 4 * _RANK * _MODULES,
    ),
    "QLoRA, prepared, under autocast": (
        _QLORA,
        lambda w, n: 2 * (4 * w.h + 4) + 12 * w.f + w.attention + 2 * w.inputs + 2 * _RANK * _MODULES + 2 * w.lora / n,
    ),
    "QLoRA, prepared, no autocast": (
        _QLORA | {"autocast": "none"},
        lambda w, n: (
            2 * (4 * w.h + 4)
            + 12 * w.f
            + 4 * (2 * w.q + 2 * w.kv)
            + 4 * w.n_h
            + 4 * (2 * w.h + w.f)
            + 4 * _RANK * _MODULES
        ),
    ),
}


def saved_activations(bench: Bench) -> Iterator[Fact]:
    """Two depths of each case at two sizes; their difference is two layers' own."""
    for name, (options, form) in SAVED.items():
        for size in SIZES:
            title = f"saved activations: {name}, width {size.hidden}"
            try:
                shallow, deep = (bench.run(_deeper(size, depth), **options) for depth in (2, 4))
            except RuntimeError as error:  # one of seven; the others are measured still
                yield _failed(title, error)
                continue
            num_tokens = deep.spec.num_tokens
            more = deep.ledger.saved_activations_bytes - shallow.ledger.saved_activations_bytes
            found = more / 2 / num_tokens
            widths = Widths(size.hidden, size.mlp, 64 * size.heads, 64 * size.kv_heads, size.heads)
            expected = form(widths, num_tokens)
            yield Fact(
                name=title,
                says="bytes kept for backward per token and layer, SDPA without a mask, no dropout",
                expected=expected,
                found=found,
                unit="B per token and layer",
                holds=_near(found, expected),
                note=f"kernels: {', '.join(deep.facts.attention_kernels) or 'none seen'}",
            )


def _deeper(size: Size, num_layers: int) -> Size:
    return Size(size.hidden, size.mlp, size.heads, size.kv_heads, num_layers, size.vocab)


# -- logits, depth, the optimizer's step -------------------------------------------------------------------------------


def logits(bench: Bench) -> Iterator[Fact]:
    """Two vocabularies; what the larger takes more at the peak, beside its weights."""
    for dtype in ("bf16", "fp32"):
        options = {"method": "lora", "lora_r": _RANK, "dtype": dtype, "autocast": "none", "lora_dtype": dtype}
        small, large = (bench.run(Size(64, 128, 1, 1, 2, vocab), **options) for vocab in (16384, 32768))
        more = _exact_training_peak(large) - _exact_training_peak(small)
        weights = large.ledger.weights_bytes - small.ledger.weights_bytes
        found = (more - weights) / (large.spec.num_tokens * 16384)
        yield Fact(
            name=f"logits in {dtype}",
            says="at the peak, per token and word, the outputs dropped before backward",
            expected=12.0,
            found=found,
            unit="B per token and word",
            holds=_near(found, 12.0),
            note=f"the peak is in {large.peak.phase}",
        )


def depth(bench: Bench) -> Iterator[Fact]:
    """Three depths on one line."""
    for options in ({"method": "full"}, {"method": "qlora", "gradient_checkpointing": True}):
        four, six, eight = (_exact_training_peak(bench.run(_deeper(SIZES[1], depth), **options)) for depth in (4, 6, 8))
        expected, found = six - four, eight - six
        yield Fact(
            name=f"linear in depth: {options['method']}",
            says="two more layers always take as much at the peak",
            expected=expected,
            found=found,
            unit="B for two layers",
            holds=_near(found, expected, 0.005),
        )


def optimizer_step(bench: Bench) -> Iterator[Fact]:
    """AdamW's step over the weights, all in bf16: with a whole copy (foreach, the default on CUDA) or without."""
    for optim, expected in (("adamw_torch", 5.0), ("adamw_torch_fused", 4.0)):
        record = bench.run(_deeper(SIZES[1], 8), method="full", optim=optim, seq_len=16)
        step = next(phase for phase in record.phases if (phase.name, phase.step) == ("optimizer_step", 2))
        workspaces = record.ledger.unaccounted_bytes  # cuBLAS's, as large as this model's weights
        found = (_exact_peak(step) - workspaces) / record.ledger.weights_bytes
        on_cuda = bench.device == "cuda"
        expected_here = expected if on_cuda or optim == "adamw_torch_fused" else None
        yield Fact(
            name=f"optimizer step: {optim}",
            says="peak of the step over the weights, all in bf16",
            expected=expected_here,
            found=found,
            unit="× weights",
            holds=None if expected_here is None else _near(found, expected_here, 0.05),
            note="" if expected_here else "foreach is the default on CUDA alone",
        )


def quantised(bench: Bench) -> Iterator[Fact]:
    """bitsandbytes' bytes per quantised weight, absmax and code books included."""
    for quant, expected in (("nf4", 0.51588), ("nf4-single", 0.5625)):
        facts = bench.run(Size(1024, 2816, 16, 4, 2), method="qlora", quant=quant, seq_len=16).facts
        books = 14 * (64 + (1024 if quant == "nf4" else 0))  # a code of 64 B a tensor, and a second one of 1,024
        found = (facts.quantised_weights_bytes - books) / facts.num_quantised_params
        yield Fact(
            name=f"weights in {quant}",
            says="bytes per quantised weight beside the code books of each tensor",
            expected=expected,
            found=found,
            unit="B per weight",
            holds=_near(found, expected),
        )


def attention(bench: Bench) -> Iterator[Fact]:
    """A padding mask turns flash off in SDPA."""
    kernels = {
        padding: bench.run(SIZES[0], method="full", padding=padding).facts.attention_kernels
        for padding in (False, True)
    }
    was_flash, is_flash = (any("Flash" in name for name in kernels[padding]) for padding in (False, True))
    yield Fact(
        name="padding and flash attention",
        says="with a padding mask, SDPA runs no flash kernel",
        expected=0.0,
        found=float(is_flash),
        unit="flash kernels",
        holds=not is_flash if bench.device == "cuda" and was_flash else None,  # where none runs, none is turned off
        note=f"without padding {kernels[False]}, with it {kernels[True]}",
    )


#: How far a replicate may be off: allocated not at all, reserved by a segment of the large pool.
_SAME = {"allocated": ("to the byte", 0), "reserved": ("within a segment of 20 MiB", 20 * 2**20)}


def repeats(bench: Bench) -> Iterator[Fact]:
    """The same cell twice: allocated to the byte, and the ledger closed."""
    one, other = (bench.run(SIZES[1], method="lora", seq_len=512) for _ in range(2))
    for tier in ("allocated", "reserved"):
        values = [getattr(record.peak, f"{tier}_bytes") for record in (one, other)]
        yield Fact(
            name=f"replicates: {tier}",
            says=f"a second process measures the same peak, {_SAME[tier][0]}",
            expected=values[0],
            found=values[1],
            unit="B",
            holds=None if None in values else abs(values[1] - values[0]) <= _SAME[tier][1],
        )
    yield Fact(
        name="ledger closure",
        says="allocated between steps that no tensor of the workload explains",
        expected=None,
        found=one.ledger.unaccounted_bytes,
        unit="B",
        holds=0 <= one.ledger.unaccounted_bytes < 2**27,
        note="steps 2 and 3 are equal to the byte, or the cell would be invalid",
    )
    yield Fact(
        name="context after full steps",
        says="device less reserved: 0.1 to 0.6 GiB by GPU and driver",
        expected=None,
        found=one.context_bytes,
        unit="B",
        holds=None if one.context_bytes is None else 0.1 * 2**30 <= one.context_bytes <= 0.6 * 2**30,
    )


# -- what no cell shows ------------------------------------------------------------------------------------------------


def libraries(bench: Bench) -> Iterator[Fact]:
    """What peft asks when it decides on conversions."""
    found = bench.probe("autocast")
    yield Fact(
        name="autocast without a device",
        says="torch.is_autocast_enabled() asks about CUDA: under CPU autocast, no",
        expected=0.0,
        found=float(found["under_cpu_autocast"]),
        unit="yes or no",
        holds=not found["under_cpu_autocast"],
    )


def device_probes(bench: Bench) -> Iterator[Fact]:
    """Context, workspaces, NVML: only a GPU can tell."""
    if bench.device != "cuda":
        for name in ("cold context", "cuBLAS workspace", "cuBLAS workspace of backward", "NVML reading"):
            yield Fact(name=name, says="only a GPU can tell", expected=None, found=None, unit="", holds=None)
        return
    context = bench.probe("context")
    yield Fact(
        name="cold context",
        says="device less reserved after the first tensor: 0.1 to 0.6 GiB",
        expected=None,
        found=context["bytes"],
        unit="B",
        holds=0.1 * 2**30 <= context["bytes"] <= 0.6 * 2**30,
        note=f"get_device_properties alone moved the device by {context['properties_bytes']} B",
    )
    blas = bench.probe("cublas")
    yield Fact(
        name="cuBLAS workspace",
        says="32 MiB on Hopper, 8.125 MiB before it; inside allocated",
        expected=blas["expected_bytes"],
        found=blas["forward_bytes"],
        unit="B",
        holds=_near(blas["forward_bytes"], blas["expected_bytes"], 0.01),
    )
    yield Fact(
        name="cuBLAS workspace of backward",
        says="the autograd thread holds a second one of the same size",
        expected=blas["expected_bytes"],
        found=blas["backward_bytes"],
        unit="B",
        holds=_near(blas["backward_bytes"], blas["expected_bytes"], 0.01),
        note="0 means that the two share one",
    )
    nvml = bench.probe("nvml")
    yield Fact(
        name="NVML reading",
        says="nvmlDeviceGetMemoryInfo costs little beside the 20 to 50 ms between two readings",
        expected=None,
        found=nvml["seconds"],
        unit="s",
        holds=nvml["seconds"] < 0.002,
    )


#: What a lent machine alone can tell comes first: its time may run out.
CHECKS = (device_probes, libraries, repeats, attention, optimizer_step, saved_activations, logits, depth, quantised)


_VERDICTS = {True: "holds", False: "DOES NOT HOLD", None: "not known"}


def check_all(device: str, file: Path) -> list[Fact]:
    """Every fact on ``device``, told and written as it is found; a check that fails is a fact that does not hold."""
    facts: list[Fact] = []

    def note(fact: Fact) -> None:
        facts.append(_told(fact))
        file.write_text(json.dumps([asdict(one) for one in facts], indent=1, ensure_ascii=False) + "\n")

    with tempfile.TemporaryDirectory(prefix="vramprobe-facts-") as folder, Bench(device, Path(folder)) as bench:
        for check in CHECKS:
            try:
                for fact in check(bench):
                    note(fact)
            except Exception as error:
                note(_failed(check.__name__, error))
    return facts


def _told(fact: Fact) -> Fact:
    values = f"expected {fact.expected}, found {fact.found} {fact.unit}".rstrip()
    print(_VERDICTS[fact.holds], fact.name, values, fact.note, sep=" · ", flush=True)
    return fact


def main() -> None:
    facts = check_all(sys.argv[2] if len(sys.argv) > 2 else "cuda", Path(sys.argv[1]))
    sys.exit(any(fact.holds is False for fact in facts))


if __name__ == "__main__":
    main()
