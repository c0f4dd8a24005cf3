"""What pyproject.toml cannot say without a warning: the allocator in C, left out where there is no compiler."""

from setuptools import Extension, setup

PLAIN = "vramprobe/allocator/plain"

setup(
    ext_modules=[
        Extension(
            "vramprobe.allocator._plain",
            [f"{PLAIN}/blocks.c", f"{PLAIN}/module.c"],
            depends=[f"{PLAIN}/blocks.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],  # one build for Python 3.11 and newer
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
