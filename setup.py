"""What pyproject.toml cannot say without a warning: the allocator in C, left out where there is no compiler.

With VRAMPROBE_PURE set it is left out, too, and the wheel is one for every platform (tools/wheels.py).
"""

import os

from setuptools import Extension, setup

PLAIN = "vramprobe/allocator/plain"

is_pure = bool(os.environ.get("VRAMPROBE_PURE"))

setup(
    ext_modules=[]
    if is_pure
    else [
        Extension(
            "vramprobe.allocator._plain",
            [f"{PLAIN}/blocks.c", f"{PLAIN}/pairing.c", f"{PLAIN}/module.c"],
            depends=[f"{PLAIN}/blocks.h", f"{PLAIN}/pairing.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],  # one build for Python 3.11 and newer
            py_limited_api=True,
            optional=True,
        )
    ],
    options={} if is_pure else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
