"""Device memory of a process beside its tensors, by what it loads: ``python benchmarks/gpu/context.py FILE [CASE …]``.

Each case runs in a process of its own, forked after torch was imported; a line of JSON each. Context: NVML's memory of
the device less what it was before the process began, less what torch reserved. Workspaces: what torch holds allocated
beside the tensors of the case.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.forked import in_a_child

_LIMIT_SECONDS = 60


def tensor(torch) -> None:
    """One tensor and no kernel."""
    torch.empty(1, device="cuda")


def kernel(torch) -> None:
    """One elementwise kernel."""
    torch.zeros(1024, device="cuda").add_(1)


def random(torch) -> None:
    """torch's own random numbers."""
    torch.randn(1024, device="cuda")


def matmul(torch, dtype="bfloat16") -> None:
    """A product by cuBLAS."""
    left = torch.ones(512, 512, device="cuda", dtype=getattr(torch, dtype))
    left @ left


def matmul_fp32(torch) -> None:
    """A product by cuBLAS in fp32."""
    matmul(torch, "float32")


def linear_with_bias(torch) -> None:
    """A product and a bias by cuBLASLt."""
    linear = torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
    linear(torch.ones(512, 512, device="cuda", dtype=torch.bfloat16))


def linear_backward(torch) -> None:
    """Its backward, on the thread of autograd's engine."""
    linear = torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16)
    linear(torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)).sum().backward()


def _attention(torch, backend) -> None:
    from torch.nn.attention import sdpa_kernel

    query = torch.ones(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(backend):
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()


def attention_flash(torch) -> None:
    """SDPA's flash kernels, forward and backward."""
    _attention(torch, torch.nn.attention.SDPBackend.FLASH_ATTENTION)


def attention_efficient(torch) -> None:
    """SDPA's memory-efficient kernels, forward and backward."""
    _attention(torch, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION)


def attention_cudnn(torch) -> None:
    """SDPA's cuDNN kernels, forward and backward."""
    _attention(torch, torch.nn.attention.SDPBackend.CUDNN_ATTENTION)


def convolution(torch) -> None:
    """A convolution by cuDNN, forward and backward."""
    layer = torch.nn.Conv2d(64, 64, 3, device="cuda")
    layer(torch.ones(8, 64, 56, 56, device="cuda")).sum().backward()


def convolution_bf16(torch) -> None:
    """A convolution by cuDNN in bf16, channels last, forward and backward."""
    layer = torch.nn.Conv2d(64, 64, 3, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    images = torch.ones(8, 64, 56, 56, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    layer(images).sum().backward()


def lstm(torch) -> None:
    """cuDNN's LSTM, forward and backward."""
    layer = torch.nn.LSTM(256, 256, device="cuda")
    layer(torch.ones(32, 8, 256, device="cuda"))[0].sum().backward()


def layer_norm(torch) -> None:
    """Layer norm, softmax and cross entropy."""
    values = torch.ones(64, 1024, device="cuda", requires_grad=True)
    normed = torch.nn.functional.layer_norm(values, (1024,))
    torch.nn.functional.cross_entropy(normed, torch.zeros(64, device="cuda", dtype=torch.long)).backward()


def svd(torch) -> None:
    """A decomposition by cuSOLVER."""
    torch.linalg.svd(torch.rand(128, 128, device="cuda"))


def fft(torch) -> None:
    """A transform by cuFFT."""
    torch.fft.fft(torch.rand(128, 1024, device="cuda"))


def sparse(torch) -> None:
    """A product by cuSPARSE."""
    torch.eye(128, device="cuda").to_sparse_csr() @ torch.rand(128, 128, device="cuda")


def nvrtc(torch) -> None:
    """A kernel that torch compiles as it runs."""
    torch.special.airy_ai(torch.rand(128, device="cuda"))


def compiled(torch) -> None:
    """A kernel by torch.compile and Triton."""
    torch.compile(lambda value: (value * 2).sin().sum())(torch.rand(1 << 16, device="cuda"))


def cuda_graph(torch) -> None:
    """A captured graph, with its pool."""
    torch.cuda.make_graphed_callables(torch.nn.Linear(512, 512, device="cuda"), (torch.ones(8, 512, device="cuda"),))


def nccl(torch) -> None:
    """A process group of one rank, and an all-reduce."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    torch.distributed.all_reduce(torch.ones(1024, device="cuda"))


def nf4(torch) -> None:
    """bitsandbytes' NF4: quantized, and a product's dequantization."""
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(512, 512, quant_type="nf4", compute_dtype=torch.bfloat16).cuda()
    layer(torch.ones(8, 512, device="cuda", dtype=torch.bfloat16))


def adam_8bit(torch) -> None:
    """A step of bitsandbytes' AdamW in 8 bits."""
    import bitsandbytes

    weight = torch.nn.Parameter(torch.ones(1 << 16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    bitsandbytes.optim.AdamW8bit([weight]).step()


def adam_fused(torch) -> None:
    """A step of torch's fused AdamW."""
    weight = torch.nn.Parameter(torch.ones(1 << 16, device="cuda"))
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()


def training_step(torch) -> None:
    """Products, attention, norm, loss and fused AdamW together."""
    for part in (linear_backward, attention_flash, layer_norm, adam_fused):
        part(torch)


def addresses(torch) -> dict[str, object]:
    """Addresses of the driver's segments: (KiB, bytes above the first) in the order of the requests, some after a free.

    Of 10 MiB and more each request is a segment; those of 512 KiB fill segments of 2 MiB.
    """
    mib = 1024
    sizes = (
        [20 * mib] * 6 + [512] * 32 + [12 * mib] * 6 + [64 * mib] * 4 + [300 * mib] * 2 + [512] * 16 + [20 * mib] * 6
    )
    held = [torch.cuda.caching_allocator_alloc(size << 10) for size in sizes]
    found = [(size, address - held[0]) for size, address in zip(sizes, held, strict=True)]
    for address in held[1::3]:
        torch.cuda.caching_allocator_delete(address)
    torch.cuda.empty_cache()
    more = [20 * mib, 512, 64 * mib, 12 * mib, 300 * mib, 20 * mib]
    again = [(size, torch.cuda.caching_allocator_alloc(size << 10) - held[0]) for size in more]
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return {"addresses": found, "after_frees": again, "first": held[0] >> 32, "stack_bytes": limit}


CASES: tuple[Callable, ...] = (
    tensor, kernel, random, matmul, matmul_fp32, linear_with_bias, linear_backward, attention_flash,
    attention_efficient, attention_cudnn, convolution, convolution_bf16, lstm, layer_norm, svd, fft, sparse, nvrtc,
    compiled, cuda_graph, nccl, nf4, adam_8bit, adam_fused, training_step, addresses,
)  # fmt: skip


def row_of(case: Callable, torch, used: Callable[[], int]) -> dict[str, object]:
    """Measure what ``case`` takes, in a process of its own."""
    before = settled(used)

    def work() -> dict[str, object]:
        told = case(torch)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return {
            "context_bytes": used() - before - torch.cuda.memory_reserved(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "allocated_bytes": torch.cuda.memory_allocated(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "free_bytes": free,
            "total_bytes": total,
        } | (told or {})

    row, status = in_a_child(work, lambda error: {"error": f"{type(error).__name__}: {error}"[:500]}, _LIMIT_SECONDS)
    return {"case": case.__name__, "before_bytes": before} | ({"error": f"status {status}"} if row is None else row)


def settled(used: Callable[[], int]) -> int:
    """NVML's figure once the last process's memory is given back: the same three times in a row."""
    figures = [used()]
    while len(figures) < 40 and (len(figures) < 3 or len(set(figures[-3:])) > 1):
        time.sleep(0.05)
        figures.append(used())
    return figures[-1]


def main() -> None:
    """A line for each case, the last with what the card and the driver say of themselves."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    v2 = pynvml.nvmlMemory_v2
    with open(sys.argv[1], "w") as file:

        def write(row: dict[str, object]) -> None:
            print(json.dumps(row), file=file, flush=True)

        for case in CASES:
            if sys.argv[2:] and case.__name__ not in sys.argv[2:]:
                continue
            write(row_of(case, torch, lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle, v2).used)))
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, v2)
        write(
            {
                "case": "card",
                "name": pynvml.nvmlDeviceGetName(handle),
                "driver": pynvml.nvmlSystemGetDriverVersion(),
                "cuda": pynvml.nvmlSystemGetCudaDriverVersion_v2(),
                "nvml_total_bytes": memory.total,
                "nvml_reserved_bytes": memory.reserved,
                "nvml_free_bytes": memory.free,
                "torch": torch.__version__,
                "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            }
        )


if __name__ == "__main__":
    main()
