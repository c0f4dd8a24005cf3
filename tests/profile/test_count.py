"""The count of one step: FLOPs and bytes of known operators, launches that the driver confirms, an equal peak."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from grids import exhaustive
from run_command import lines, profiled, unprofiled
from torch.utils.flop_counter import flop_registry

from vramprobe.emulate.values.count import operators
from vramprobe.emulate.values.count.flops import flops_of, pairs_of
from vramprobe.emulate.values.count.operators import size_of

SCRIPT = """
import torch, torch.nn.functional as F
layer = torch.nn.Linear(512, 256, bias=False, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False)
beside, kept = torch.cuda.Stream(), torch.zeros(256, 512, dtype=torch.bfloat16).pin_memory()
for step in range(NUM_STEPS):
    x = torch.zeros(64, 512, dtype=torch.bfloat16).cuda()
    q = torch.zeros(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    loss = layer(x).sum() + F.scaled_dot_product_attention(q, q, q, is_causal=True).sum()
    loss.backward()
    with torch.cuda.stream(beside):
        kept.copy_(layer.weight.detach(), non_blocking=True)
    optimizer.step()
    optimizer.zero_grad()
print("peak", torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
"""


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


CASES: dict[str, tuple[Any, list[torch.Tensor]]] = {
    "mm": (torch.ops.aten.mm, [meta(64, 512), meta(512, 256)]),
    "addmm": (torch.ops.aten.addmm, [meta(256), meta(64, 512), meta(512, 256)]),
    "bmm": (torch.ops.aten.bmm, [meta(3, 64, 512), meta(3, 512, 256)]),
    "baddbmm": (torch.ops.aten.baddbmm, [meta(3, 64, 256), meta(3, 64, 512), meta(3, 512, 256)]),
}


@pytest.mark.parametrize("name", CASES)
def test_products_are_counted_as_torch_counts_them(name: str) -> None:
    operator, tensors = CASES[name]
    schema = operator.default._schema
    given = dict(zip((one.name for one in schema.arguments), tensors, strict=False))
    out = operator(*tensors)
    expected = flop_registry[operator](*tensors, out_val=out)
    assert flops_of(schema.name, given, out) == ("product", expected)


def test_counting_leaves_a_gradient_to_its_one_owner() -> None:
    """Autograd adds in place to memory that nobody else owns."""
    gradient = torch.zeros(4)
    address = torch._C._storage_address(gradient)
    assert operators._bytes("aten::add", [gradient], [torch.zeros(4)], []) == (16, 16)
    assert torch._C._storage_Use_Count(address) == 1


@pytest.mark.parametrize("is_transposed", [False, True])
def test_convolutions_are_counted_as_torch_counts_them(is_transposed: bool) -> None:
    x, weight = meta(2, 8, 16, 16), meta(8, 4, 3, 3) if is_transposed else meta(12, 4, 3, 3)
    words = (None, [1, 1], [0, 0], [1, 1], is_transposed, [0, 0], 1 if is_transposed else 2)
    out = torch.ops.aten.convolution(x, weight, *words)
    given = {"input": x, "weight": weight, "transposed": is_transposed}
    if is_transposed:
        assert flops_of("aten::convolution", given, out) == ("product", 2 * 2 * 8 * 16 * 16 * 4 * 9)
    else:
        assert flops_of("aten::convolution", given, out) == ("product", 2 * out.numel() * 4 * 9)
        given |= {"grad_output": out, "output_mask": [True, True, False]}
        assert flops_of("aten::convolution_backward", given, out) == ("product", 2 * 2 * out.numel() * 4 * 9)


def test_attention_is_counted_by_its_layout_and_on_and_below_the_diagonal() -> None:
    """[batch, length, heads, width] of flash-attn, which torch's registry takes for heads by length."""
    given: dict[str, Any] = {name: meta(2, 4, 128, 64) for name in ("query", "key", "value")} | {"is_causal": False}
    whole = 4 * 2 * 4 * 128 * 128 * 64
    assert flops_of("aten::_scaled_dot_product_flash_attention", given, None) == ("attention", whole)
    flash = {name: one.transpose(1, 2) if name != "is_causal" else True for name, one in given.items()}
    assert flops_of("aten::_flash_attention_forward", flash, None) == ("attention", whole * 129 // 256)
    assert flops_of("aten::_flash_attention_backward", flash, None) == ("attention", whole * 129 * 5 // 512)
    assert flops_of("aten::add", given, None) is None


def test_pairs_of_a_window_are_those_of_a_mask() -> None:
    for window in (None, 1, 3, 7, 20):
        mask = torch.ones(7, 7).tril()
        if window is not None:
            mask = mask.triu(1 - window)
        assert pairs_of(7, 7, True, window) == int(mask.sum())


def test_an_expanded_dimension_is_read_once() -> None:
    assert size_of(torch.zeros(1, 8).expand(4, 8)) == 8 * 4
    assert size_of(torch.zeros(4, 8).t()) == 4 * 8 * 4


@pytest.mark.parametrize(("major", "expected"), [(8, [False, True]), (7, [False, False])])
def test_fp32_runs_as_tf32_in_convolutions_alone(
    major: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's default, on GPUs that have it."""
    monkeypatch.setattr(operators, "_capability", lambda device: (major, 0))
    assert [operators._is_tf32(name, None) for name in ("aten::mm", "aten::convolution_backward")] == expected
    assert not operators._is_tf32("aten::_scaled_dot_product_efficient_attention", None)
    try:
        torch.set_float32_matmul_precision("high")
        assert operators._is_tf32("aten::addmm", None) == (major == 8)
    finally:
        torch.set_float32_matmul_precision("highest")


@exhaustive
def test_a_step_on_an_emulated_card_is_counted_exactly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    without = unprofiled(tmp_path, SCRIPT, num_steps=4)
    capfd.readouterr()
    assert profiled(tmp_path, SCRIPT, num_steps=4).exit_status == 0
    assert capfd.readouterr().out == without  # the same peak, to the byte
    (count,) = lines(tmp_path, "count")
    assert (count["step"], count["unclaimed"], count["num_claimed"]) == (2, {}, count["num_launches"])
    rows = {(row["phase"], row["name"], row["what"]): row for row in count["rows"]}
    linear = rows["forward", "aten::mm", "product"]
    assert linear["flops"] == 2 * 64 * 512 * 256
    assert (linear["read"], linear["written"], linear["launches"]) == (2 * (64 * 512 + 512 * 256), 2 * 64 * 256, 1)
    assert rows["backward", "aten::mm", "product"]["flops"] == 2 * 64 * 512 * 256  # no gradient of the input
    attention = rows["forward", "aten::_scaled_dot_product_flash_attention", "attention"]
    pairs = 128 * 129 // 2
    assert attention["flops"] == 4 * 2 * 4 * pairs * 64
    backward = rows["backward", "aten::_scaled_dot_product_flash_attention_backward", "attention"]
    assert backward["flops"] == 10 * 2 * 4 * pairs * 64
    assert backward["line"][1] == attention["line"][1] == 9  # the line whose forward made autograd's node
    sgd = rows["optimizer", "aten::add_", "other"]
    weight_bytes = 2 * 512 * 256
    assert (sgd["read"], sgd["written"], sgd["launches"]) == (2 * weight_bytes, weight_bytes, 1)
    copied = [row for row in count["rows"] if row["what"] == "host_to_device"]
    assert [(row["read"], row.get("is_beside")) for row in copied] == [(2 * 64 * 512, None)]
    (offloaded,) = (row for row in count["rows"] if row["what"] == "device_to_host")
    assert (offloaded["read"], offloaded["is_beside"]) == (weight_bytes, True)


REPEATED = """
import torch
from torch.utils.checkpoint import checkpoint

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()
    @staticmethod
    def backward(ctx, given):
        x, weight = ctx.saved_tensors
        return given @ weight, given.t() @ x

weight = torch.zeros(256, 512, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(NUM_STEPS):
    x = torch.zeros(64, 512, device="cuda", requires_grad=True)
    for use_reentrant in (False, True):
        checkpoint(lambda x: Product.apply(x, weight).tanh(), x, use_reentrant=use_reentrant).sum().backward()
    optimizer.step()
"""


@exhaustive
def test_the_repeated_forward_of_an_autograd_function_is_no_backward(tmp_path: Path) -> None:
    """Gradients are off in it, as in backward: bitsandbytes' products are such."""
    assert profiled(tmp_path, REPEATED, num_steps=4, compiles=True).exit_status == 0
    (count,) = lines(tmp_path, "count")
    product = 2 * 64 * 512 * 256
    flops = dict.fromkeys(("forward", "recompute", "backward"), 0)
    for row in count["rows"]:
        flops[row["phase"]] = flops.get(row["phase"], 0) + row["flops"]
    assert flops == {"forward": 2 * product, "recompute": 2 * product, "backward": 4 * product, "optimizer": 0}


PACKED = """
import torch, bitsandbytes as bnb
words = dict(compute_dtype=torch.bfloat16, compress_statistics=True, quant_type="nf4")
layer = bnb.nn.Linear4bit(1024, 512, bias=False, **words).cuda()
scale = torch.ones((), device="cuda", dtype=torch.bfloat16, requires_grad=True)
optimizer = torch.optim.SGD([scale], lr=0.1)
for step in range(NUM_STEPS):
    for rows in ROWS:
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda")
        layer(x * scale).sum().backward()
    optimizer.step()
"""


@exhaustive
@pytest.mark.parametrize("num_rows", [2048, 4])
def test_a_packed_product_is_counted_once(tmp_path: Path, num_rows: int) -> None:
    """bitsandbytes unpacks the weight for torch's product where it has many rows; few have one kernel of its own."""
    assert profiled(tmp_path, PACKED.replace("ROWS", f"[{num_rows}]"), num_steps=4).exit_status == 0
    (count,) = lines(tmp_path, "count")
    assert count["num_claimed"] == count["num_launches"]
    product, weight = 2 * num_rows * 1024 * 512, 1024 * 512
    activations = 2 * num_rows * (1024 + 512)
    rows = [row for row in count["rows"] if row["phase"] == "forward"]
    assert sum(row["flops"] for row in rows) == product
    (multiplied,) = (row for row in rows if row["what"] == "product")
    blocks, sums = weight // 64, 4 * weight // 64 // 256
    unpacked = [row for row in rows if row["name"] == "bitsandbytes::dequantize_4bit"]
    if num_rows == 4:
        assert not unpacked
        assert multiplied["name"] == "bitsandbytes::gemm_4bit"
        moved = multiplied["read"] + multiplied["written"]
        assert activations + weight // 2 + blocks < moved < activations + weight // 2 + blocks + sums + 4096
        return
    assert (multiplied["read"] + multiplied["written"]) == activations + 2 * weight
    (unpacked,) = unpacked
    assert unpacked["read"] == weight // 2 + sums + 5 * blocks
    assert unpacked["written"] == 2 * weight + 4 * blocks
    backward = [row for row in count["rows"] if row["phase"] == "backward"]
    assert sum(row["flops"] for row in backward) == product


def test_products_of_bitsandbytes_are_counted() -> None:
    given = {"A": meta(2, 32, 512), "B": meta(65536, 1, dtype=torch.uint8), "shapeB": [256, 512]}
    assert flops_of("bitsandbytes::gemm_4bit", given, None) == ("product", 2 * 64 * 512 * 256)
    given = {"A": meta(64, 512, dtype=torch.int8), "B": meta(256, 512, dtype=torch.int8)}
    assert flops_of("bitsandbytes::int8_linear_matmul", given, None) == ("product", 2 * 64 * 512 * 256)


def _kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as it is in a profiled process."""
    values = ModuleType("vramprobe_values")
    values.imports = ModuleType("vramprobe_values.imports")  # type: ignore[attr-defined]
    values.imports.when_imported = lambda name, then: None
    for name, module in (("vramprobe_values", values), ("vramprobe_values.imports", values.imports)):
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("vramprobe.emulate.values.count.kernels")


def test_a_library_whose_base_class_hands_out_its_functions_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes 0.43: ``lib`` is of a class that inherits ``__getattr__``."""
    kernels = _kernels(monkeypatch)

    class Native:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: name

    class OfCuda(Native):
        pass

    class Counting:
        is_on, is_within = True, False

        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []

        def begin(self, name: str) -> str:
            return name

        def end(self, begun: str) -> int:
            return 1

        def note(self, row: dict[str, Any]) -> None:
            self.rows.append(row)

    module, count = SimpleNamespace(lib=OfCuda()), Counting()
    kernels._watch_library(module)
    kept = module.lib.cdequantize_blockwise_fp16_nf4  # as foak keeps it, before there is a count
    monkeypatch.setattr(kernels, "_count", count)
    assert module.lib.cdequantize_blockwise_bf16_nf4(0, 0, 64, 4096) == "cdequantize_blockwise_bf16_nf4"
    kept(0, 0, 64, 4096)
    assert [(row["name"], row["read"], row["written"]) for row in count.rows] == [
        ("bitsandbytes::cdequantize_blockwise_bf16_nf4", 2048, 8192),
        ("bitsandbytes::cdequantize_blockwise_fp16_nf4", 2048, 8192),
    ]


TTIR = """
tt.func public @_norm({x}: !tt.ptr<f16> {{tt.divisibility = 16 : i32}}, {n}: i32, {y}: !tt.ptr<f16>, {r}: !tt.ptr<f32>)
    attributes {{noinline = false}} {{
  %0 = tt.splat {x} : !tt.ptr<f16> -> tensor<64x!tt.ptr<f16>>
  %1 = tt.addptr %0, %offsets : tensor<64x!tt.ptr<f16>>, tensor<64xi32>
  %2 = tt.load %1, %mask : tensor<64x!tt.ptr<f16>>
  %3 = tt.splat {y} : !tt.ptr<f16> -> tensor<64x!tt.ptr<f16>>
  tt.store %3, %2 : tensor<64x!tt.ptr<f16>>
}}
"""


@pytest.mark.parametrize("names", [("%x_ptr", "%n", "%y_ptr", "%r_ptr"), ("%arg0", "%arg1", "%arg2", "%arg3")])
def test_what_a_triton_kernel_touches_is_known_by_the_places_of_its_pointers(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.0 calls all arguments argN; a pointer that is only handed over is neither loaded nor stored."""
    kernels = _kernels(monkeypatch)
    given = dict(zip("xnyr", names, strict=True))
    assert kernels.touched(TTIR.format(**given)) == ({0}, {1})
    tensors = [torch.zeros(64, dtype=torch.float16), torch.zeros(32, dtype=torch.float16), torch.zeros(8)]
    kernel = SimpleNamespace(asm={"ttir": TTIR.format(**given)})
    assert kernels._bytes_of_kernel(kernel, tensors) == (128, 64)
