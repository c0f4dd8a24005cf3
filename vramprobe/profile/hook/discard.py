"""Redirect what a run writes after its steps to a folder that is deleted; large tensors are written as holes.

In: that folder, once the steps are done. Out: ``torch.save``, safetensors' ``save_file``, each ``save_pretrained`` and
the checkpoints of accelerate, DeepSpeed, torchtune and torch.distributed are written there, and found there. Nothing is
pushed to the hub. ``on_damage(path)`` is called before an older file elsewhere is overwritten or deleted: an emulated
run computes nothing that is worth it.
"""

import functools
import io
import os
import stat
import sys
import time

from vramprobe_values.imports import instead_of

from .holes import described, write_holes

_LARGE_BYTES = 1 << 20
_CLOCK_NS = 20_000_000  # a file's time may be that of the kernel's last tick
#: (module, class, its functions that write to the folder or file that they take first, those that read from it).
_FOLDERS = (
    ("transformers.modeling_utils", "PreTrainedModel", ("save_pretrained",), ("from_pretrained",)),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase", ("save_pretrained",), ("from_pretrained",)),
    ("transformers.processing_utils", "ProcessorMixin", ("save_pretrained",), ("from_pretrained",)),
    ("peft.peft_model", "PeftModel", ("save_pretrained",), ("from_pretrained",)),
    ("peft.config", "PeftConfigMixin", ("save_pretrained",), ("from_pretrained",)),
    ("accelerate.accelerator", "Accelerator", ("save_state",), ("load_state",)),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", ("save_checkpoint", "save_16bit_model"), ("load_checkpoint",)),
    ("torch.distributed.checkpoint.filesystem", "_FileSystemWriter", ("__init__",), ()),
    ("torch.distributed.checkpoint.filesystem", "FileSystemReader", (), ("__init__",)),
)
#: torchtune's, which ask for the size of what they wrote.
_CHECKPOINTERS = (
    "FullModelHFCheckpointer",
    "FullModelMetaCheckpointer",
    "FullModelTorchTuneCheckpointer",
    "DistributedCheckpointer",
)
_FOLDER_WORDS = ("save_directory", "output_dir", "save_dir", "path")
_PUSHES = (
    ("transformers.trainer", "Trainer", "push_to_hub"),
    ("transformers.trainer", "Trainer", "_push_from_checkpoint"),
    ("transformers.utils.hub", "PushToHubMixin", "push_to_hub"),
    ("huggingface_hub.hf_api", "HfApi", "create_commit"),
    ("huggingface_hub.hf_api", "HfApi", "create_repo"),
    ("huggingface_hub.hf_api", "HfApi", "upload_folder"),
)


class Discard:
    """``begin``: from now on. ``when_imported`` as in vramprobe_values.imports."""

    def __init__(self, folder, remark, on_damage):
        self.folder, self._remark, self._on_damage = os.path.join(folder, "discarded"), remark, on_damage
        self._is_on, self._is_ending, self._since_ns = False, False, time.time_ns() - _CLOCK_NS

    def install(self, when_imported):
        """Wrap what writes, as soon as its module is there; until ``begin`` all of it is as before."""
        when_imported("torch", lambda torch: self._wrap(torch, "save", self._torch_save))
        when_imported("safetensors.torch", lambda module: self._wrap(module, "save_file", self._safetensors_save))
        for module, *what in _FOLDERS:
            when_imported(module, functools.partial(self._folders, *what))
        when_imported("torchtune.training.checkpointing._checkpointer", self._checkpointers)
        for module, kind, function in _PUSHES:
            when_imported(module, functools.partial(self._pushes, kind, function))

    def begin(self):
        """From now on."""
        if not self._is_on:
            self._is_on = True
            sys.addaudithook(self._heard)

    def path(self, path):
        """Return the path to which ``path`` is redirected."""
        where = os.path.abspath(os.fspath(path))
        if not self._is_on or where.startswith(os.path.abspath(self.folder)):
            return path
        return os.path.join(self.folder, where.lstrip(os.sep))

    def _wrap(self, owner, function, instead):
        @instead_of(owner, function)
        def wrapped(run, *args, **kwargs):
            return instead(run, *args, **kwargs) if self._is_on else run(*args, **kwargs)

    def _folders(self, kind, writers, readers, module):
        owner = getattr(module, kind, None)
        for names, act in ((writers, self._written_elsewhere), (readers, self._found_elsewhere)):
            for name in names:
                if owner is not None and name in vars(owner):
                    instead_of(owner, name)(act)

    def _written_elsewhere(self, run, owner, *args, **kwargs):
        if not self._is_on:
            return run(owner, *args, **kwargs)
        words = [self._moved(args[0]), *args[1:]] if args else []
        return run(owner, *words, **{name: self._moved_if(name, value) for name, value in kwargs.items()})

    def _checkpointers(self, module):
        for kind in _CHECKPOINTERS:
            if hasattr(module, kind):
                self._wrap(getattr(module, kind), "save_checkpoint", self._checkpointer_save)

    def _checkpointer_save(self, run, checkpointer, *args, **kwargs):
        checkpointer._output_dir = self._moved(checkpointer._output_dir)
        return run(checkpointer, *args, **kwargs)

    def _moved_if(self, name, value):
        return self._moved(value) if name in _FOLDER_WORDS else value

    def _moved(self, value):
        return type(value)(self.path(value)) if isinstance(value, (str, os.PathLike)) else value

    def _found_elsewhere(self, load, cls, *args, **kwargs):
        words = [self._read(one) for one in args]
        return load(cls, *words, **{name: self._read(value) for name, value in kwargs.items()})

    def _read(self, value):
        if self._is_on and isinstance(value, (str, os.PathLike)) and os.path.exists(self.path(value)):
            return os.fspath(self.path(value))
        return value

    def _torch_save(self, run, obj, f, *args, **kwargs):
        import torch

        if isinstance(f, (str, os.PathLike)):
            f = self._made(f)
        skip = getattr(torch.serialization, "skip_data", None)
        if skip is None or isinstance(f, io.BytesIO) or _num_bytes(obj) < _LARGE_BYTES:
            return run(obj, f, *args, **kwargs)
        with skip():
            return run(obj, f if isinstance(f, str) else _Skipping(f), *args, **kwargs)

    def _safetensors_save(self, run, tensors, filename, metadata=None):
        write_holes(self._made(filename), {name: described(one) for name, one in tensors.items()}, metadata)

    def _made(self, path):
        path = os.fspath(self.path(path))
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        return path

    def _pushes(self, kind, function, module):
        owner = getattr(module, kind, None)
        if hasattr(owner, function):
            self._wrap(owner, function, self._push)

    def _push(self, run, *args, **kwargs):
        self._remark("nothing was pushed to the hub: the values of an emulated run are not computed")

    def _heard(self, event, args):
        """An audit hook, which stays for the life of the process."""
        damaged, folder = None, -1
        if event == "open" and (args[2] or 0) & os.O_TRUNC:
            damaged = args[0]
        elif event == "os.remove":
            damaged, folder = args
        elif event == "os.rename":
            damaged, folder = args[1], args[3]
        if self._is_ending or not isinstance(damaged, (str, bytes)):
            return
        path = os.path.join(f"/proc/self/fd/{folder}" if folder >= 0 else "", os.fsdecode(damaged))
        try:
            path = os.path.realpath(path)
            found = os.stat(path)
        except OSError:
            return
        if stat.S_ISREG(found.st_mode) and found.st_mtime_ns < self._since_ns and not self._is_ours(path):
            self._is_ending = True
            self._on_damage(path)

    def _is_ours(self, path):
        home = os.path.realpath(os.path.dirname(self.folder)) + os.sep
        return path.startswith((home, os.path.realpath(os.path.expanduser("~/.cache")) + os.sep)) or (
            "__pycache__" in path
        )


class _Skipping:
    """A stream to write to, as torch's distributed checkpoints hand it over, in which torch.save may leave holes."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def seek(self, num_bytes, whence):
        """``num_bytes`` of the data follow, which nobody needs."""
        under = self._stream
        while not under.seekable() and hasattr(under, "raw"):
            under = under.raw
        if under.seekable():
            return under.seek(num_bytes, whence)
        for at in range(0, num_bytes, _LARGE_BYTES):
            self.write(bytes(min(_LARGE_BYTES, num_bytes - at)))
        return num_bytes


def _num_bytes(value, seen=None):
    import torch

    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_num_bytes(one, seen) for one in value.values())
    return sum(_num_bytes(one, seen) for one in value) if isinstance(value, (list, tuple)) else 0
