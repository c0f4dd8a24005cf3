"""Workspaces that cuDNN requests beside the tensors: ``python benchmarks/gpu/workspaces.py FILE [SECONDS]``.

A line of JSON for each operator, forward and backward, after a warm-up in the same process; ``forward`` and
``backward`` are the allocator's own history, in order: a request in bytes, or minus the bytes of what was freed. No
document states these workspaces.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator

#: ResNet's, a stem's, a U-Net's, a diffusion decoder's: (channels in, out, kernel, stride, side).
CONVOLUTIONS = (
    (3, 64, 7, 2, 224), (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (64, 256, 1, 1, 56), (256, 128, 1, 1, 56),
    (128, 128, 3, 2, 56), (256, 512, 1, 2, 56), (512, 128, 1, 1, 28), (128, 128, 3, 1, 28), (512, 256, 1, 1, 28),
    (256, 256, 3, 1, 14), (1024, 256, 1, 1, 14), (512, 512, 3, 1, 7), (2048, 512, 1, 1, 7), (3, 64, 3, 1, 256),
    (64, 128, 3, 1, 128), (320, 320, 3, 1, 64), (640, 640, 3, 1, 32), (1280, 1280, 3, 1, 16), (3, 768, 16, 16, 224),
    (3, 1152, 14, 14, 378), (96, 96, 5, 1, 28),
)  # fmt: skip
#: (rows, steps, inputs, hidden, layers).
RECURRENT = ((8, 256, 512, 1024, 3), (32, 100, 128, 256, 1), (64, 50, 300, 512, 2), (1, 128, 64, 64, 1))
DTYPES = ("float32", "bfloat16", "float16")


def cases(torch) -> Iterator[tuple[dict[str, object], Callable[[], object], tuple]]:
    """(What it is, a maker of the module, the shape of its input)."""
    nn = torch.nn
    for cin, cout, kernel, stride, side in CONVOLUTIONS:
        for rows in (1, 16, 64) if side <= 224 else (4,):
            for last in (False, True):
                told = {"kind": "conv2d", "in": cin, "out": cout, "kernel": kernel, "stride": stride, "last": last}
                yield told, _maker(nn.Conv2d, cin, cout, kernel, stride, kernel // 2 * (stride < kernel)), (
                    rows, cin, side, side,
                )  # fmt: skip
    for groups, cin, side in ((32, 128, 56), (64, 64, 112), (384, 384, 14)):
        for last in (False, True):
            told = {"kind": "conv2d", "in": cin, "out": cin, "kernel": 3, "stride": 1, "groups": groups, "last": last}
            yield told, _maker(nn.Conv2d, cin, cin, 3, 1, 1, 1, groups), (16, cin, side, side)
    for cin, cout, side in ((128, 64, 64), (256, 128, 28), (512, 256, 14)):
        told = {"kind": "conv_transpose2d", "in": cin, "out": cout, "kernel": 4, "stride": 2, "last": False}
        yield told, _maker(nn.ConvTranspose2d, cin, cout, 4, 2, 1), (8, cin, side, side)
    for cin, cout, length in ((80, 384, 3000), (384, 384, 1500), (512, 512, 400)):
        told = {"kind": "conv1d", "in": cin, "out": cout, "kernel": 3, "stride": 1, "last": False}
        yield told, _maker(nn.Conv1d, cin, cout, 3, 1, 1), (8, cin, length)
    for cin, cout, side in ((3, 64, 32), (64, 64, 16)):
        told = {"kind": "conv3d", "in": cin, "out": cout, "kernel": 3, "stride": 1, "last": False}
        yield told, _maker(nn.Conv3d, cin, cout, 3, 1, 1), (4, cin, side, side, side)
    for rows, steps, inputs, hidden, layers in RECURRENT:
        for name in ("LSTM", "GRU"):
            for both in (False, True):
                told = {"kind": name.lower(), "hidden": hidden, "layers": layers, "both_ways": both}
                named = {"batch_first": True, "bidirectional": both, "dropout": 0.1 if layers > 1 else 0.0}
                yield told, _maker(getattr(nn, name), inputs, hidden, layers, **named), (rows, steps, inputs)
    for channels, side, rows in ((64, 112, 16), (256, 56, 16), (512, 7, 64), (2048, 7, 16), (64, 56, 256)):
        for last in (False, True):
            told = {"kind": "batch_norm2d", "in": channels, "last": last}
            yield told, _maker(nn.BatchNorm2d, channels), (rows, channels, side, side)


def _maker(kind, *words, **named) -> Callable[[], object]:
    return lambda: kind(*words, **named)


def history(torch) -> list[int]:
    """Requests and frees since the last call, in order."""
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=10000)
    signs = {"alloc": 1, "free_completed": -1}
    return [signs[entry["action"]] * entry["size"] for entry in trace if entry["action"] in signs]


def row_of(torch, told: dict[str, object], maker: Callable, shape: tuple, dtype: str) -> dict[str, object]:
    """The operator's requests, the second time that it runs in this process."""
    module = maker().to("cuda", getattr(torch, dtype))
    values = torch.rand(shape, device="cuda", dtype=getattr(torch, dtype)).requires_grad_()
    if hasattr(module, "flatten_parameters"):
        module.flatten_parameters()
    if told.get("last"):
        module = module.to(memory_format=torch.channels_last)
        values = values.detach().to(memory_format=torch.channels_last).requires_grad_()
    row: dict[str, object] = told | {"shape": shape, "dtype": dtype}
    for _ in range(2):
        module.zero_grad()
        values.grad = None
        history(torch)
        outputs = module(values)
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        row["forward"] = history(torch)
        gradient = torch.ones_like(outputs)
        history(torch)
        outputs.backward(gradient)
        del outputs, gradient
        row["backward"] = history(torch)
    return row


def main() -> None:
    """A line for each operator and dtype, one with its error for what fails; ends after SECONDS."""
    import torch

    until = time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else 600)
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=10000)
    with open(sys.argv[1], "w") as file:
        for told, maker, shape in cases(torch):
            for dtype in DTYPES:
                if time.monotonic() > until:
                    return
                try:
                    row = row_of(torch, told, maker, shape, dtype)
                except RuntimeError as error:
                    row = told | {"shape": shape, "dtype": dtype, "error": str(error)[:200]}
                print(json.dumps(row), file=file, flush=True)


if __name__ == "__main__":
    main()
