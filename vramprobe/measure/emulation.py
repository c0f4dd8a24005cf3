"""The emulated instrument's own part of a cell: values on while it runs, and what its record must say of them.

In: the CudaInstrument of a process that sees an emulated GPU (emulate/). Out: the same instrument under another name,
which also knows what was not computed and who read it, and what was asked of NCCL. The counters are the allocator's, as
on a real card.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from vramprobe.catalog import gpu_seen
from vramprobe.choices import PhaseName
from vramprobe.emulate import machine_folder, values
from vramprobe.emulate.enter import VALUES_VARIABLE
from vramprobe.emulate.machine import read_machine
from vramprobe.emulate.values import allocations
from vramprobe.measure.cuda import CudaInstrument
from vramprobe.measure.environment import emulator_here
from vramprobe.measure.observation import Observation
from vramprobe.records.record import MAX_READS, Emulation, ValueRead, Verification
from vramprobe.records.traffic import CollectiveTraffic, added_up, moved_since


class EmulatedInstrument(CudaInstrument):
    """The cuda instrument on an emulated card."""

    name = "emulated"

    def __init__(self, limit_vram_bytes: int | None = None, ordinal: int = 0) -> None:
        super().__init__(limit_vram_bytes, ordinal)
        self._watch: Any = None
        self.verified_cards = [ordinal]  # those whose allocations :meth:`verify` compares
        self._verification: Verification | None = None
        self._traffic: dict[int, list[CollectiveTraffic]] = {}  # by step
        self._counted: Any = None  # what a StepCount asks of: the phase that is on, who hears of a step's end

    def start(self) -> None:
        """As on a real card, with small values computed and the others known for what they are."""
        self._watch = values.enable(values.Policy(**json.loads(os.environ.get(VALUES_VARIABLE, "{}"))))
        super().start()

    @contextmanager
    def phase(self, name: PhaseName, step: int | None = None, micro_step: int | None = None) -> Iterator[None]:
        """As on a real card, with what it asked NCCL to move."""
        driver = self._watch.mode.driver
        before = driver.moved()
        if self._counted is not None:
            self._counted.name = name
        with super().phase(name, step, micro_step):
            yield
        if step is not None:
            self._traffic.setdefault(step, []).extend(moved_since(before, driver.moved(), name))

    def finish(self) -> Observation:
        """As on a real card, with the last step's traffic."""
        last = max(self._traffic, default=None)
        return replace(super().finish(), traffic=None if last is None else added_up(self._traffic[last]))

    def count_launches(self) -> Callable[[int], dict[str, Any] | None]:
        """Count what step 2 launches; the result is called at each step's end and returns the count, once it is known.

        Its fields are those of emulate/values/count/step.py.
        """
        from vramprobe.emulate.values.count import kernels
        from vramprobe.emulate.values.count.step import StepCount

        kernels.watch()
        found: list[dict[str, Any]] = []
        self._counted = SimpleNamespace(name="", on_step=[])
        StepCount(self._watch, self._counted, lambda kind, **fields: found.append(fields))

        def ended(step: int) -> dict[str, Any] | None:
            for hear in self._counted.on_step:
                hear(step)
            return found[0] if found else None

        return ended

    def verify(self, step: Callable[[], None]) -> None:
        """Run ``step`` once under each content that uncomputed values may have, and compare what it allocates."""
        contents, sequences = [], []
        for policy in values.verification_policies(self._watch.policy):
            with self._watch.under(policy), allocations.recorded() as events:
                step()
                torch.cuda.synchronize()
                sequences.append([event for card in self.verified_cards for event in events(card)])
            contents.append(policy.contents)
        self._verification = Verification(**allocations.verdict(contents, sequences))

    def emulation(self) -> Emulation:
        """Describe the emulation for the record, as of now."""
        (num_cards, machine), report = read_machine(machine_folder()), self._watch.report() if self._watch else None
        seen = report or {"policy": values.Policy().as_dict()}
        name = torch.cuda.get_device_name(0)
        known = gpu_seen(name)
        return Emulation(
            card=known.short_name if known else name,
            num_cards=num_cards,
            emulator_version=emulator_here(),
            torch_build=torch.__version__,
            contents=seen["policy"]["contents"],
            routing=seen["policy"]["routing"],
            context_bytes=machine.context_bytes,
            graph_bytes=seen.get("graph_bytes"),
            is_busy=os.environ.get("CUDA_LAUNCH_BLOCKING") != "1",
            num_launches=None if report is None else int(self._watch.mode.driver.launches()),
            num_reads=seen.get("num_reads"),
            num_steering_reads=seen.get("num_reads_that_could_have_steered"),
            reads=[ValueRead(**read) for read in seen.get("reads", ())[:MAX_READS]],
            verification=self._verification,
        )
