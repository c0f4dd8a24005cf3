"""Run torch's operators on the GPU that this process sees, each in a forked child; a line of JSON each on stdout.

``operators.py`` starts this under an emulated GPU; it imports nothing of vramprobe's. The operators and their inputs
are those of torch's own tests (``op_db``). In: a JSON list of operators' names on stdin, [] for all.
"""

import json
import os
import signal
import sys
import types
import unittest
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.forked import in_a_child

_MAX_SAMPLES = 4
_LIMIT_SECONDS = 60


def operators() -> list:
    """torch's table; the process may fork afterwards, because no GPU is asked for while the table is made."""
    if "expecttest" not in sys.modules:  # of torch's own test classes, which are not used
        module = types.ModuleType("expecttest")
        module.TestCase, module.assert_expected_inline = unittest.TestCase, None
        sys.modules["expecttest"] = module
    for library in ("numba", "cupy", "jax"):  # torch's tests ask them for a GPU, and no fork could use it afterwards
        sys.modules.setdefault(library, None)
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        torch.cuda.is_available = is_available
    for operator in op_db:
        if hasattr(operator.op, "is_cuda_available"):  # of the jiterator, which asked when it was made
            operator.op.is_cuda_available = True
    return list(op_db)


def name_of(operator) -> str:
    """``linalg.svd``, or ``norm(fro)`` for a variant."""
    return operator.name + (f"({operator.variant_test_name})" if operator.variant_test_name else "")


def tensors_of(value) -> list[torch.Tensor]:
    """Every tensor in a nest of tuples, lists and dictionaries."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def try_operator(operator, device: str) -> dict[str, object]:
    """Try the operator's first inputs, forward and backward; raises what the operator raises."""
    supported = operator.supported_dtypes(device)
    order = (torch.float32, torch.float16, torch.complex64, torch.int64, torch.bool)
    dtype = next((one for one in order if one in supported), None)
    if dtype is None:
        return {"outcome": "no dtype on this GPU"}
    differentiable = operator.supports_autograd and dtype in operator.supported_backward_dtypes(device)
    num_backward = 0
    for number, sample in enumerate(operator.sample_inputs(device, dtype, requires_grad=differentiable)):
        if number == _MAX_SAMPLES:
            break
        result = operator(sample.input, *sample.args, **sample.kwargs)
        if sample.output_process_fn_grad is not None:
            result = sample.output_process_fn_grad(result)
        outputs = [one for one in tensors_of(result) if one.requires_grad and one.grad_fn is not None]
        if differentiable and outputs:
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
            num_backward += 1
        if device == "cuda":
            torch.cuda.synchronize()
    return {"outcome": "forward and backward" if num_backward else "forward", "dtype": str(dtype).split(".")[1]}


def said(error: BaseException) -> str:
    """The exception's kind and first line."""
    return f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[0].split())}"[:300]


def outcome_of(operator, device: str) -> dict[str, object]:
    """The operator's row: what ``try_operator`` returned, its exception, or the signal that ended the child."""
    row, status = in_a_child(
        lambda: try_operator(operator, device),
        lambda error: {"outcome": "exception", "error": said(error)},
        _LIMIT_SECONDS,
    )
    if os.WIFSIGNALED(status):
        late = os.WTERMSIG(status) == signal.SIGALRM
        return {"outcome": f"not done in {_LIMIT_SECONDS} s" if late else f"signal {os.WTERMSIG(status)}"}
    return {"outcome": f"exit status {os.WEXITSTATUS(status)}"} if row is None else row


def row_of(operator) -> dict[str, object]:
    """The operator's row; what does not run is tried on the CPU, too."""
    row = outcome_of(operator, "cuda")
    if row["outcome"] in ("forward", "forward and backward"):
        return row
    other = outcome_of(operator, "cpu")
    return row | {"on_the_cpu": other.get("error", other["outcome"])}


def main() -> None:
    """A line for each operator that stdin names."""
    warnings.simplefilter("ignore")
    wanted = set(json.load(sys.stdin))
    for operator in operators():
        if not wanted or name_of(operator) in wanted:
            print(json.dumps({"operator": name_of(operator)} | row_of(operator)), flush=True)


if __name__ == "__main__":
    main()
