"""One rank of several that train small stacks of layers by FSDP2, FSDP1 and DDP, and talk as frameworks do.

``python … KIND…``, under a launcher; started by test_only_rank.py.
"""

import os
import sys

import torch
import torch.distributed as dist

LOCAL = int(os.environ["LOCAL_RANK"])


def talk() -> None:
    """Objects, flags, barriers, groups of cards and of the host: each answer is one that could be."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    said: list[tuple[str, int] | None] = [None] * num_ranks
    dist.all_gather_object(said, ("said", 7))
    assert said == [("said", 7)] * num_ranks
    dist.broadcast_object_list(["mine"], src=0)
    dist.barrier()
    flags = torch.ones(3, device="cuda")
    dist.all_reduce(flags)
    assert flags.tolist() == [num_ranks] * 3
    parts = [torch.empty(2, device="cuda") for _ in range(num_ranks)]
    dist.all_gather(parts, torch.ones(2, device="cuda"))
    assert all(part.tolist() == [1, 1] for part in parts)
    counts = torch.empty(num_ranks, dtype=torch.long, device="cuda")
    dist.all_to_all_single(counts, torch.full((num_ranks,), 5, device="cuda"))
    assert counts.tolist() == [5] * num_ranks
    pairs = [dist.new_group([first, first + 1]) for first in range(0, num_ranks, 2)]
    dist.all_reduce(flags, group=pairs[rank // 2])
    assert flags.tolist() == [2 * num_ranks] * 3
    host = dist.new_group(backend="gloo")
    assert dist.get_backend(host) == "gloo"
    dist.all_gather_object(said, "host", group=host)
    dist.barrier(group=host)


def sharded(kind: str, layers: torch.nn.Module) -> torch.nn.Module:
    """The layers, as this way of training wraps them."""
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        return fully_shard(layers)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(layers, auto_wrap_policy=ModuleWrapPolicy([torch.nn.Linear]), device_id=LOCAL)
    # With it the first buckets stay: without it others replace them, and NCCL's watchdog lets go of them when it looks.
    return torch.nn.parallel.DistributedDataParallel(layers, device_ids=[LOCAL], find_unused_parameters=True)


def train(kind: str) -> None:
    """Three steps, with clipping."""
    torch.manual_seed(0)
    model = sharded(kind, torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.cuda.set_device(LOCAL)
    bound = {"device_id": torch.device("cuda", LOCAL)} if "bound" in sys.argv else {}
    dist.init_process_group("nccl", **bound)
    talk()
    for kind in sys.argv[1:]:
        if kind != "bound":
            train(kind)
