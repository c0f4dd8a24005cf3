"""One rank of a world whose other ranks run nowhere: this process is it, and is answered as if they were like it.

In: ``VRAMPROBE_ONE_RANK``, ``RANK WORLD_SIZE CARDS``. Out: one process in that rank's environment, whatever its
launcher said (the launcher's others end at their start), under a torch.distributed that waits for nobody: a store in
which the others have written what this rank wrote, gloo groups and object collectives that give each rank this one's
contents. NCCL between cards is the emulated one's, which asks for the same variable (driver/nccl.c). What only another
rank could say ends in one line instead of a wait; a small tensor of an absent rank's is answered with this one's own
values, and a line that reads it is named.
"""

import atexit
import functools
import importlib
import inspect
import os
import pickle
import re
import types

VARIABLE = "VRAMPROBE_ONE_RANK"
_UNIQUE_ID = re.compile(r"(^|/)\d+(:\d+)?$")  # ProcessGroupNCCL's counter, or a pair of ranks
_UNIQUE_ID_BYTES = 128
#: What mpirun and srun say of a process: (rank, number of ranks, rank on its machine).
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_SMALL_BYTES = 1024  # of a tensor whose values may steer a program
#: Collectives of tensors that bring other ranks' values, and what those ranks would have done; ``src`` names the rank.
_BROUGHT = {
    "broadcast": "broadcast",
    "scatter": "scattered",
    "recv": "sent",
    "all_reduce": "added",
    "all_gather_into_tensor": "sent",
}

remarks = []  # what was answered otherwise than the other ranks would have
_noted = set()  # collectives of which a reading line has been named
on_leave = []  # called in a process that turns out to be another rank's


def environment(rank, world_size, num_cards):
    """Return the variables that a launcher of the whole world gives this rank, on machines of so many cards each."""
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


def instead_of(outer, rank, world_size, num_cards):
    """The environment ``outer`` for this rank, without what mpirun or srun said of the process that starts it."""
    said = {name for names in _MPI for name in names}
    return {name: value for name, value in outer.items() if name not in said} | environment(rank, world_size, num_cards)


def settle():
    """At a process's start, before anything reads its environment; -> (rank, number of ranks), or None."""
    told = os.environ.get(VARIABLE)
    if not told:
        return None
    rank, world_size, num_cards = map(int, told.split())
    for names in (*_MPI, ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        said = [os.environ.get(name, "") for name in names]
        if said[0].isdecimal() and not _is_this(rank, world_size, *said):
            _leave()
    os.environ.update(environment(rank, world_size, num_cards))
    return rank, world_size


def _is_this(rank, world_size, said_rank, said_world_size, said_local_rank):
    """Return True if a launcher's process is the rank that runs: of a launcher of the whole world the one with its
    number, of a smaller one the first.
    """
    if str(said_world_size) == str(world_size):
        return str(said_rank) == str(rank)
    return str(said_local_rank or said_rank) == "0"


def _leave():
    for act in on_leave:
        act()
    os._exit(0)


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
    replaced = _objects(torch.distributed, rank, world_size) | _tensors(torch.distributed, rank)
    for module in (torch.distributed, distributed_c10d):
        for name, function in replaced.items():
            setattr(module, name, function)
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
    if not hasattr(FakeProcessGroup, "options"):  # torch 2.8 and older write the group's name and ranks into gloo's
        FakeProcessGroup.options = types.SimpleNamespace()
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


def _objects(dist, this_rank, this_world_size):
    """The collectives of objects, pickled and read again as between processes; and the beginning of the world."""
    begin = dist.init_process_group

    def copied(value):
        return pickle.loads(pickle.dumps(value))

    def is_here(rank):
        return rank is None or rank == this_rank

    source_of = functools.partial(_source_of, dist)

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
        said_world_size, said_rank = words.get("world_size", -1), words.get("rank", -1)
        if said_rank >= 0 and not _is_this(this_rank, this_world_size, said_rank, said_world_size, said_rank):
            _leave()  # torch.multiprocessing.spawn says a rank to its function alone
        return begin(*args, **words)

    replaced = (all_gather_object, gather_object, broadcast_object_list, scatter_object_list, init_process_group)
    return {one.__name__: one for one in replaced}


def _source_of(dist, src, group, group_src):
    if src is None and group_src is not None:
        return dist.get_global_rank(group or dist.group.WORLD, group_src)
    return src or 0


def _tensors(dist, this_rank):
    """The collectives of _BROUGHT: their small results are known to be this rank's own values."""
    from .reads import here

    def watched(name, run):
        words_of = inspect.signature(run)
        takes_root = "src" in words_of.parameters

        @functools.wraps(run)
        def collective(*args, **words):
            given = words_of.bind(*args, **words).arguments
            result = run(*args, **words)
            tensor, group = next(iter(given.values())), given.get("group")
            if tensor.numel() * tensor.element_size() > _SMALL_BYTES or dist.get_world_size(group) < 2:
                return result
            if not takes_root:
                who = "all ranks"
            else:
                source = _source_of(dist, given.get("src"), group, given.get("group_src"))
                if source == this_rank:
                    return result
                who = f"rank {source}"
            _received(
                tensor, f"what {who} would have {_BROUGHT[name]} at {here()['line']}", is_like_ours=not takes_root
            )
            return result

        return collective

    found = ((name, getattr(dist, name, None)) for name in _BROUGHT)
    return {name: watched(name, run) for name, run in found if run is not None}


def _received(tensor, said, is_like_ours):
    """A tensor holds this rank's own values where others would have sent theirs."""
    from . import enabled

    watch = enabled()
    if watch is not None and watch.mode.known.on_device(tensor):
        watch.mode.known.hold_as_absent(tensor, said, is_assumed=not is_like_ours)
    elif not is_like_ours and not tensor.is_floating_point():
        _remark(f"a tensor of {tensor.numel()} values on the host kept this rank's own, for {said}")


def note_read(said, is_assumed, place):
    """The host reads such a tensor: the line that does, where it may steer the program."""
    if said not in _noted and (is_assumed or place["branches"]):
        _noted.add(said)
        _remark(
            f"{place['line']} reads {said}, and got this rank's own values instead, which may lead it another way than "
            "with all ranks: run them all, or the rank that sends (often --only-rank 0)"
        )


def _remark(line):
    if line not in remarks:
        remarks.append(line)
