"""One rank of a world whose other ranks run nowhere: this process is it, and is answered as if they were like it.

In: ``VRAMPROBE_ONE_RANK``, ``RANK WORLD_SIZE CARDS``. Out: a process in that rank's environment, whatever its launcher
said (the launcher's other ranks end at their start), under a torch.distributed that waits for nobody: a store in which
the others have written what this rank wrote, gloo groups and object collectives that give each rank this one's
contents. NCCL between cards is the emulated one's, which asks for the same variable (driver/nccl.c). What only another
rank could say ends in one line instead of a wait.
"""

import atexit
import importlib
import os
import pickle
import re

VARIABLE = "VRAMPROBE_ONE_RANK"
_UNIQUE_ID = re.compile(r"(^|/)\d+(:\d+)?$")  # ProcessGroupNCCL's counter, or a pair of ranks
_UNIQUE_ID_BYTES = 128

remarks = []  # what was answered otherwise than the other ranks would have


def environment(rank, world_size, num_cards):
    """What a launcher of the whole world would tell this rank, on machines of so many cards each."""
    return {
        VARIABLE: f"{rank} {world_size} {num_cards}",
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % num_cards),
        "LOCAL_WORLD_SIZE": str(min(num_cards, world_size)),
        "GROUP_RANK": str(rank // num_cards),
        "NODE_RANK": str(rank // num_cards),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def settle():
    """At a process's start, before anything reads its environment; -> (rank, number of ranks), or None."""
    told = os.environ.get(VARIABLE)
    if not told:
        return None
    rank, world_size, num_cards = map(int, told.split())
    said = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    if said != (str(rank), str(world_size)):
        if os.environ.get("LOCAL_RANK", "0") != "0":  # the launcher's others
            os._exit(0)
        os.environ.update(environment(rank, world_size, num_cards))
    return rank, world_size


def install(torch, rank, world_size):
    """Stand before what waits for others in torch.distributed."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # its function has taken the name
    store_of = _store_class(torch.distributed.Store)
    stores = {}

    def store():
        return stores.setdefault("one", store_of(rank))

    def handle(url, **words):
        yield store(), rank, world_size

    for scheme in ("env", "tcp", "file"):
        rendezvous._rendezvous_handlers[scheme] = handle
    objects = _objects(torch.distributed, rank)
    for module in (torch.distributed, distributed_c10d):
        for name, replaced in objects.items():
            setattr(module, name, replaced)
        if hasattr(module, "TCPStore"):
            module.TCPStore = _tcp_store(module.TCPStore, store)
    if hasattr(distributed_c10d, "ProcessGroupGloo"):
        distributed_c10d.ProcessGroupGloo = _gloo(distributed_c10d.ProcessGroupGloo)
    atexit.register(_end_groups, torch.distributed)


def _end_groups(distributed):
    """NCCL's watchdogs ask the store, which is Python's, as long as their groups live: those end before Python does."""
    try:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    except Exception:  # of a group that the program has ended in its own way
        return


def _store_class(base):
    class Store(base):
        """Keys of this rank's; another rank's key is taken for this one's that differs in its numbers alone."""

        def __init__(self, rank):
            super().__init__()
            self._rank, self._values, self._like = rank, {}, {}

        def set(self, key, value):
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._like[_shape(key)] = key

        def get(self, key):
            if key in self._values:
                return self._values[key]
            like = self._like.get(_shape(key))
            if like is not None:
                return self._values[like]
            if _UNIQUE_ID.search(key):
                return bytes(_UNIQUE_ID_BYTES)
            raise RuntimeError(
                f"vramprobe: rank {self._rank} asks for {key!r} in the store, which another rank would have written, "
                "and no other runs under --only-rank: run all, or a rank that needs none of it (often --only-rank 0)"
            )

        def add(self, key, amount):
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            return value

        def compare_set(self, key, expected, desired):
            if self._values.get(key, expected.encode()) == expected.encode():
                self.set(key, desired)
            return self._values[key]

        def wait(self, keys, timeout=None):
            pass

        def check(self, keys):
            return all(key in self._values for key in keys)

        def delete_key(self, key):
            return self._values.pop(key, None) is not None

        def num_keys(self):
            return len(self._values)

        def append(self, key, value):
            self._values[key] = self._values.get(key, b"") + (
                value.encode() if isinstance(value, str) else bytes(value)
            )

        def multi_get(self, keys):
            return [self.get(key) for key in keys]

        def multi_set(self, keys, values):
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def has_extended_api(self):
            return True

        def set_timeout(self, timeout):
            pass

        def clone(self):
            return self

    return Store


def _shape(key):
    return re.sub(r"\d+", "#", key)


def _tcp_store(real, store):
    def TCPStore(*args, **words):
        """A store of a world that waits for its ranks is this rank's; a launcher's own is as it was."""
        world_size = words.get("world_size", args[2] if len(args) > 2 else None)
        waits = words.get("wait_for_workers", args[5] if len(args) > 5 else True)
        return store() if waits and world_size is not None and world_size > 1 else real(*args, **words)

    return TCPStore


def _gloo(real):
    """Groups on the host: torch's own stand-in, which gives every rank this one's contents."""
    from torch._C._distributed_c10d import FakeProcessGroup

    FakeProcessGroup._set_sequence_number_for_group = lambda group: None  # torch asks gloo's for it, and it refuses
    FakeProcessGroup._set_default_timeout = lambda group, timeout: None  # as torchtitan does: nothing is waited for

    class OfThisRank(type):
        def __call__(cls, store, rank, size, *args, **words):
            made = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)
            return made(rank, size)

        def __instancecheck__(cls, group):
            return isinstance(group, (real, FakeProcessGroup))

        def __getattr__(cls, name):
            return getattr(real, name)

    return OfThisRank("ProcessGroupGloo", (), {})


def _objects(dist, this_rank):
    """The collectives of objects, pickled and read again as between processes; and the beginning of the world."""
    begin = dist.init_process_group

    def copied(value):
        return pickle.loads(pickle.dumps(value))

    def is_here(rank):
        return rank is None or rank == this_rank

    def source_of(src, group, group_src):
        if src is None and group_src is not None:
            return dist.get_global_rank(group or dist.group.WORLD, group_src)
        return src or 0

    def all_gather_object(object_list, obj, group=None):
        object_list[:] = [copied(obj) for _ in object_list]

    def gather_object(obj, object_gather_list=None, dst=None, group=None, group_dst=None):
        if is_here(source_of(dst, group, group_dst)):
            object_gather_list[:] = [copied(obj) for _ in object_gather_list]

    def broadcast_object_list(object_list, src=None, group=None, device=None, group_src=None):
        source = source_of(src, group, group_src)
        if not is_here(source):
            _remark(f"rank {this_rank} kept its own objects where rank {source} would have broadcast its")

    def scatter_object_list(output, given=None, src=None, group=None, group_src=None):
        source = source_of(src, group, group_src)
        if is_here(source):
            output[0] = copied(given[dist.get_group_rank(group or dist.group.WORLD, this_rank)])
        else:
            output[0] = None
            _remark(f"rank {this_rank} was given None where rank {source} would have scattered an object")

    def init_process_group(*args, device_id=None, **words):  # bound to a card, groups would be split of the world's
        return begin(*args, **words)

    replaced = (all_gather_object, gather_object, broadcast_object_list, scatter_object_list, init_process_group)
    return {one.__name__: one for one in replaced}


def _remark(line):
    if line not in remarks:
        remarks.append(line)
