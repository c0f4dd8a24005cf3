"""Kernels that reach the driver past torch's dispatcher: Triton's JIT, Inductor's, bitsandbytes' C library.

In: the process's StepCount, once it has one. Out: its rows of these kernels. Bytes of a Triton kernel: each tensor that
it is given once, by whether its compiled code (TTIR) loads or stores it; without its code, read once.
"""

import re

from ..imports import when_imported
from .operators import plain_row, shown, size_of, tensors_of

_CALL_OF_BITSANDBYTES = re.compile(r"c(de)?quantize|cadam|clion|cmomentum|crmsprop|cadagrad|cademamix|cgemm_4bit|cgemv")
#: Inductor's own products and flex attention. Their operations are not known: a mask's are in values.
_TEMPLATE = "triton_tem_"
#: A pointer made of another one.
_POINTER = re.compile(r"(%\w+)(?::\d+)? = (?:tt\.(?:addptr|splat|broadcast|bitcast|expand_dims)|arith\.select) (.*)")
_BYTES_OF = {"bf16": 2, "fp16": 2, "fp32": 4}


_count = None


def watch():
    """Wrap what launches by itself, as soon as it has been imported: some keep bitsandbytes' functions from then on."""
    when_imported("triton.runtime.jit", lambda module: _wrap(module.JITFunction, "triton"))
    when_imported(
        "torch._inductor.runtime.triton_heuristics", lambda module: _wrap(module.CachingAutotuner, "inductor")
    )
    when_imported("bitsandbytes.cextension", _watch_library)


def count_into(count):
    """Count launches into this StepCount from now on."""
    global _count
    _count = count


def _wrap(owner, nameless):
    run = owner.run

    def watched(self, *args, **kwargs):
        count = _count
        if count is None or not count.is_on or kwargs.get("warmup"):
            return run(self, *args, **kwargs)
        name = f"triton::{getattr(self.fn, '__name__', nameless)}"
        begun, kernel = count.begin(name), None
        try:
            kernel = run(self, *args, **kwargs)
        finally:
            launched = count.end(begun)
        if launched and _TEMPLATE in name:
            count.leave(name, launched)
        elif launched:
            names = getattr(self, "arg_names", ())
            bound = dict(zip(names, args, strict=False)) | kwargs
            tensors = [one for name in names or bound for one in tensors_of(bound.get(name))] or tensors_of(args)
            dtype = str(tensors[0].dtype)[6:] if tensors else ""
            read, written = _bytes_of_kernel(kernel, tensors)
            count.note(plain_row(name, shown(tensors), launched, dtype=dtype, read=read, written=written))
        return kernel

    owner.run = watched


_touched = {}  # by kernel


def _bytes_of_kernel(kernel, tensors):
    text = (getattr(kernel, "asm", None) or {}).get("ttir") if kernel is not None else None
    if not text:
        return sum(map(size_of, tensors)), 0
    if id(kernel) not in _touched:
        _touched[id(kernel)] = (kernel, touched(text))
    loaded, stored = _touched[id(kernel)][1]
    return tuple(sum(size_of(one) for at, one in enumerate(tensors) if at in which) for which in (loaded, stored))


def touched(ttir):
    """TTIR → (which of its pointers it loads from, which it stores to), by their places: Triton 3.0 names none."""
    header = re.search(r"tt\.func .*?\((.*?)\)\s*(?:attributes|\{)", ttir, re.S)
    pointers = re.findall(r"(%\w+): !tt\.ptr<", header.group(1) if header else "")
    origin = {name: at for at, name in enumerate(pointers)}
    loaded, stored = set(), set()
    for line in map(str.strip, ttir.splitlines()):
        if "iter_args" in line:
            for inner, outer in re.findall(r"(%\w+) = (%[\w#]+)", line.split("iter_args", 1)[1]):
                if outer in origin:
                    origin[inner] = origin[outer]
        for word, into in (("tt.load", (loaded,)), ("tt.store", (stored,)), ("tt.atomic_", (loaded, stored))):
            if word in line:
                operands = re.findall(r"%[\w#]+", line.split(word, 1)[1])
                base = next((origin[one] for one in operands if one in origin), None)
                for found in into if base is not None else ():
                    found.add(base)
        made = _POINTER.match(line)
        if made:
            operands = re.findall(r"%[\w#]+", made.group(2))
            base = next((origin[one] for one in operands if one in origin), None)
            if base is not None:
                origin[made.group(1)] = base
    return loaded, stored


def _watch_library(module):
    """bitsandbytes by ctypes, where no operator of torch's stands around the call (before 0.46)."""
    library = getattr(module, "lib", None)
    kind, wrapped = type(library), {}
    plain = getattr(kind, "__getattr__", None)  # 0.43 has it of a base class
    if plain is None:
        return

    def getting(self, item):
        found = plain(self, item)
        if not _CALL_OF_BITSANDBYTES.match(item) or not callable(found):
            return found
        if item not in wrapped:
            wrapped[item] = _Called(found, item)
        return wrapped[item]

    kind.__getattr__ = getting


class _Called:
    """A function of the C library; ctypes' own attributes (argtypes, restype) are the function's."""

    def __init__(self, function, name):
        self.__dict__.update(_function=function, _name=name)

    def __getattr__(self, name):
        return getattr(self._function, name)

    def __setattr__(self, name, value):
        setattr(self._function, name, value)

    def __call__(self, *args):
        count = _count
        if count is None or not count.is_on or count.is_within:
            return self._function(*args)
        begun = count.begin(f"bitsandbytes::{self._name}")
        try:
            return self._function(*args)
        finally:
            launched = count.end(begun)
            if launched:
                count.note(self._row(args, launched))

    def _row(self, args, launched):
        """The last number of the call is how many elements it works on."""
        numbers = [getattr(one, "value", one) for one in args]
        numbers = [one for one in numbers if isinstance(one, int) and 0 < one < 1 << 40]
        elements = numbers[-1] if numbers else 0
        wide = next((size for word, size in _BYTES_OF.items() if word in self._name), 4)
        packed = elements // 2 if "nf4" in self._name or "fp4" in self._name else elements
        name, shapes = f"bitsandbytes::{self._name}", f"{elements} elements"
        return plain_row(name, shapes, launched, read=packed, written=wide * elements)
