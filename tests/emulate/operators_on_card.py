"""Operators of vision, speech and linear algebra on the GPU that this process sees, a forked child each.

Prints ``NAME: ok``, or what ended the child; then the sizes of recurrent networks, as JSON.
"""

import itertools
import json
import os
import warnings

import torch
from torch import nn

CUDA = {"device": "cuda"}


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", requires_grad=True)


def norm(**how) -> None:
    x = image(2, 8, 32, 32)
    nn.BatchNorm2d(8).cuda()(x.to(**how) if how else x).sum().backward()


def layer(made: nn.Module, *shape: int) -> None:
    made.cuda()(image(*shape)).sum().backward()


def recurrent(made: nn.Module, *shape: int) -> None:
    made.cuda()(image(*shape))[0].sum().backward()


def solved(name: str, *shape: int) -> None:
    """Forward and backward of a function of torch.linalg, of a matrix that it has a gradient for."""
    x = torch.randn(*shape, **CUDA)
    x = (x @ x.mT + 3 * torch.eye(shape[-1], **CUDA)).requires_grad_()
    given = [x] + [torch.randn(*shape[:-1], 2, **CUDA)] * (name in ("lstsq", "solve"))
    found = getattr(torch.linalg, name)(*given)
    out = found if isinstance(found, torch.Tensor) else found[0]
    (out.abs() if out.is_complex() else out).sum().backward()


#: Modules, and what no row of benchmarks/truth/operators.csv takes.
OPERATORS = {
    "batch norm, fp16": lambda: norm(dtype=torch.float16),
    "batch norm, bf16": lambda: norm(dtype=torch.bfloat16),
    "batch norm, channels_last": lambda: norm(memory_format=torch.channels_last),
    "batch norm, evaluation": lambda: nn.BatchNorm2d(8).cuda().eval()(image(2, 8, 32, 32)),
    "convolution": lambda: layer(nn.Conv2d(3, 8, 3, padding=1), 2, 3, 32, 32),
    "depthwise convolution": lambda: layer(nn.Conv2d(8, 8, 3, groups=8), 2, 8, 32, 32),
    "LSTM": lambda: recurrent(nn.LSTM(16, 32, 2, batch_first=True), 2, 10, 16),
    "GRU with dropout": lambda: recurrent(nn.GRU(16, 32, 2, dropout=0.1), 10, 2, 16),
    "sparse product": lambda: torch.sparse.mm(torch.eye(64, **CUDA).to_sparse(), torch.randn(64, 8, **CUDA)),
    "rfft2": lambda: torch.fft.rfft2(image(2, 3, 32, 32)).abs().sum().backward(),
}
FACTORIZATIONS = ("svd", "qr", "eigh", "eigvals", "cholesky", "inv", "lu_factor", "lstsq", "solve", "pinv", "det")
OPERATORS |= {
    f"{name} {'x'.join(map(str, shape))}": lambda name=name, shape=shape: solved(name, *shape)
    for name, shape in itertools.product(FACTORIZATIONS, ((6, 6), (300, 300), (3, 40, 40)))
}


def ended(name: str) -> str:
    """Run the operator in a child, and return how the child ended."""
    read, written = os.pipe()
    if not (child := os.fork()):
        try:
            OPERATORS[name]()
            torch.cuda.synchronize()
            os.write(written, b"ok")
        except BaseException as error:
            os.write(written, f"{type(error).__name__}: {error}".encode()[:400])
        os._exit(0)
    os.close(written)
    with open(read, "rb") as pipe:
        said = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else said


def recurrent_sizes() -> dict[str, object]:
    """Bytes of the weights of every kind of recurrent network beside what they must be, and of two reserve spaces."""
    wrong = []
    for kind, both, layers, half, projected in itertools.product(
        (nn.LSTM, nn.GRU, nn.RNN), (False, True), (1, 3), (False, True), (0, 5)
    ):
        if projected and kind is not nn.LSTM:
            continue
        more = {"proj_size": projected} if projected else {}
        made = kind(16, 32, layers, bidirectional=both, **more).to("cuda", torch.float16 if half else torch.float32)
        made(torch.randn(10, 2, 16, device="cuda", dtype=next(made.parameters()).dtype))
        [storage] = {at.untyped_storage().data_ptr(): at.untyped_storage() for at in made.parameters()}.values()
        right = sum(at.numel() * at.element_size() for at in made.parameters())
        if storage.nbytes() != right:
            wrong.append([str(made), storage.nbytes(), right])
    kept = {}
    for kind in (nn.LSTM, nn.GRU):
        made, x = kind(123, 320, 4).cuda(), torch.randn(1000, 25, 123, device="cuda")
        before = torch.cuda.memory_allocated()
        out, last = made(x)
        states = sum(at.untyped_storage().nbytes() for at in (out, *(last if isinstance(last, tuple) else [last])))
        kept[kind.__name__] = torch.cuda.memory_allocated() - before - states
        del out, last
    return {"wrong": wrong, "kept": kept}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in OPERATORS:
        print(f"{name}: {ended(name)}", flush=True)
    print(json.dumps(recurrent_sizes()))
