"""Collectives that end by a future on two ranks: ``pace_training.py STORE RANK``; rank 0 prints MiB after each.

A loop of constant shapes with a reduce-scatter and an all-gather of lists a step (allocated, then its peak), then one
collective at a time. Garbage is left to Python, so that nothing but torch's watchdog gives tensors back.
"""

import gc
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

MIB = 1 << 20
SIDE = 1280


def steps(rank: int, world: int) -> list[tuple[int, int]]:
    layers = [torch.nn.Parameter(torch.zeros(SIDE, SIDE, device="cuda")) for _ in range(16)]
    optimizer, seen = torch.optim.SGD(layers, lr=0.1), []
    for _ in range(5):
        x = torch.randn(64, SIDE, device="cuda")
        for layer in layers:
            x = x @ layer
        x.sum().backward()
        groups = [layers[at : at + world] for at in range(0, len(layers), world)]
        grads = [[layer.grad for layer in group] for group in groups]
        futures = [dist.reduce_scatter(one[rank], one, async_op=True).get_future() for one in grads]
        for future in futures:
            future.wait()
        with torch.no_grad():
            futures = [dist.all_gather(group, group[rank], async_op=True).get_future() for group in groups]
        torch.futures.collect_all(futures).wait()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seen.append((torch.cuda.memory_allocated() // MIB, torch.cuda.max_memory_allocated() // MIB))
    return seen


def rounds(call: Callable[[], object]) -> list[int]:
    seen = []
    for _ in range(4):
        call()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated() // MIB)
    return seen


def main() -> None:
    rank, world = int(sys.argv[2]), 2
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
    gc.disable()
    seen = {"steps": steps(rank, world)}
    one, whole = torch.zeros(SIDE, SIDE, device="cuda"), torch.zeros(world * SIDE, SIDE, device="cuda")
    parts = [torch.zeros(SIDE, SIDE, device="cuda") for _ in range(world)]
    calls = {
        "reduce_scatter": lambda: dist.reduce_scatter(one, parts, async_op=True),
        "all_gather": lambda: dist.all_gather(parts, one, async_op=True),
        "all_reduce": lambda: dist.all_reduce(torch.zeros_like(whole), async_op=True),
    }
    for name, call in calls.items():
        seen[name] = rounds(lambda call=call: call().get_future().wait())
        seen[f"{name}, wait"] = rounds(lambda call=call: call().wait())
    if rank == 0:
        print("SEEN", seen, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
