"""A GPU without a GPU: NVIDIA's real software stack above, a CUDA driver of our own below.

In: an installation of torch's CUDA build, a card of the catalog. Out: environment variables under which any process
sees that card: memory, streams, errors and NVML are true, kernels compute nothing. Lines it may not cross: it needs no
NVIDIA library, header or device, changes nothing of theirs, imports torch in ``values`` alone, and ends a run at a
function that it does not know rather than answer with garbage.
"""

import os
from pathlib import Path

from vramprobe.errors import SpecError

#: The folder of the emulated machine that this process and its children see; unset on the real one.
MACHINE_VARIABLE = "VRAMPROBE_EMULATED_MACHINE"


def machine_folder() -> Path | None:
    """The emulated machine that this process sees; None on the real one."""
    named = os.environ.get(MACHINE_VARIABLE)
    return Path(named) if named else None


def require_emulated() -> None:
    """Raises SpecError where this process sees no emulated machine, as ``verify`` wants one."""
    if machine_folder() is None:
        raise SpecError("a step is repeated under other values on an emulated GPU alone: give --emulate GPU, too")
