"""The emulated instrument's own part of a cell: values on while it runs, and what its record must say of them.

In: the CudaInstrument of a process that sees an emulated GPU (emulate/). Out: the same instrument under another name,
which also knows what was not computed and who read it. The counters are the allocator's, as on a real card.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from vramprobe.catalog import gpu_seen
from vramprobe.emulate import machine_folder, values
from vramprobe.emulate.enter import VALUES_VARIABLE
from vramprobe.emulate.machine import read_machine
from vramprobe.emulate.values import allocations
from vramprobe.measure.cuda import CudaInstrument
from vramprobe.measure.environment import emulator_here
from vramprobe.records.record import MAX_READS, Emulation, ValueRead, Verification


class EmulatedInstrument(CudaInstrument):
    """The cuda instrument on an emulated card."""

    name = "emulated"

    def __init__(self, limit_vram_bytes: int | None = None, ordinal: int = 0) -> None:
        super().__init__(limit_vram_bytes, ordinal)
        self._watch: Any = None
        self._verification: Verification | None = None

    def start(self) -> None:
        """As on a real card, with small values computed and the others known for what they are."""
        self._watch = values.enable(values.Policy(**json.loads(os.environ.get(VALUES_VARIABLE, "{}"))))
        super().start()

    def verify(self, step: Callable[[], None]) -> None:
        """Run ``step`` once under each content that uncomputed values may have, and compare what it allocates."""
        contents, sequences = [], []
        for policy in values.verification_policies(self._watch.policy):
            with self._watch.under(policy), allocations.recorded() as events:
                step()
                torch.cuda.synchronize()
                sequences.append(events())
            contents.append(policy.contents)
        self._verification = Verification(**allocations.verdict(contents, sequences))

    def emulation(self) -> Emulation:
        """What the record says of the emulation, as things stand."""
        (num_cards, machine), report = read_machine(machine_folder()), self._watch.report() if self._watch else None
        seen = report or {"policy": values.Policy().as_dict()}
        name = torch.cuda.get_device_name(0)
        known = gpu_seen(name)
        return Emulation(
            card=known.short_name if known else name, num_cards=num_cards,
            emulator_version=emulator_here(), torch_build=torch.__version__,
            contents=seen["policy"]["contents"], routing=seen["policy"]["routing"],
            context_bytes=machine.context_bytes,
            num_launches=None if report is None else int(self._watch.mode.driver.launches()),
            num_reads=seen.get("num_reads"), num_steering_reads=seen.get("num_reads_that_could_have_steered"),
            reads=[ValueRead(**read) for read in seen.get("reads", ())[:MAX_READS]],
            verification=self._verification,
        )  # fmt: skip
