"""Probes that need a process of their own: ``python benchmarks/gpu/probes.py NAME`` prints what it finds as JSON.

For facts.py. Each looks at one thing that no cell shows; all but ``autocast`` need a GPU.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

_NUM_READINGS = 200


def autocast() -> dict[str, bool]:
    """Whether the question that names no device says yes under each autocast."""
    import torch

    found = {}
    for device in ("cpu", "cuda"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # without a GPU, autocast for it says that it is off
            with torch.autocast(device, dtype=torch.bfloat16):
                found[f"under_{device}_autocast"] = torch.is_autocast_enabled()
    return found


def context() -> dict[str, int]:
    """What the context takes when the first tensor stands, and what asking for properties does."""
    import torch

    from vramprobe.measure import nvml

    device = nvml.open_first_visible()
    before = device.used_bytes()
    torch.cuda.get_device_properties(0)
    after_properties = device.used_bytes()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    used = device.used_bytes() - before
    return {"bytes": used - torch.cuda.memory_reserved(), "properties_bytes": after_properties - before}


def cublas() -> dict[str, int]:
    """What a first product leaves allocated, and what its backward adds, beside the tensors themselves."""
    import torch

    def standing() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    hopper = torch.cuda.get_device_capability(0)[0] == 9
    left = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    right = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    before = standing()
    product = left @ right
    forward = standing() - before - product.nbytes
    gradient = torch.ones_like(product)
    before = standing()
    product.backward(gradient)
    backward = standing() - before - left.grad.nbytes
    expected = 32 * 2**20 if hopper else 8 * 2**20 + 128 * 2**10
    return {"forward_bytes": forward, "backward_bytes": backward, "expected_bytes": expected}


def nvml() -> dict[str, float]:
    """Seconds of one reading of the device's memory, the mean of many."""
    from vramprobe.measure import nvml

    device = nvml.open_first_visible()
    device.used_bytes()
    began = time.perf_counter()
    for _ in range(_NUM_READINGS):
        device.used_bytes()
    return {"seconds": (time.perf_counter() - began) / _NUM_READINGS}


PROBES = {probe.__name__: probe for probe in (autocast, context, cublas, nvml)}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
