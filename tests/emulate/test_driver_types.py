"""The declared structs against NVIDIA's own headers, where a copy is at hand, and the driver under other compilers."""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from grids import grid

SOURCES = Path(__file__).parents[2] / "vramprobe" / "emulate" / "driver"
HEADERS = os.environ.get("VRAMPROBE_CUDA_HEADERS", "")

# ours → NVIDIA's, and the fields that are named otherwise there
STRUCTS = {
    "struct cuda_device_properties": ("struct cudaDeviceProp", {}),
    "struct cuda_function_attributes": ("struct cudaFuncAttributes", {}),
    "struct cuda_pointer_attributes": ("struct cudaPointerAttributes", {}),
    "struct cuda_dim3": ("dim3", {}),
    "struct cuda_launch_config": ("cudaLaunchConfig_t", {}),
    "struct cuda_driver_launch_config": ("CUlaunchConfig", {}),
    "struct cuda_memory_location": ("struct cudaMemLocation", {}),
    "struct cuda_memory_access": ("struct cudaMemAccessDesc", {}),
    "struct cuda_allocation_properties": ("CUmemAllocationProp", {}),
    "struct cuda_pool_properties": ("struct cudaMemPoolProps", {"maxSize": None, "usage": None}),
    "struct cuda_ipc_handle": ("cudaIpcMemHandle_t", {"bytes": "reserved"}),
    "struct cuda_copy_3d": (
        "struct cudaMemcpy3DParms",
        {"srcX": "srcPos.x", "srcY": "srcPos.y", "srcZ": "srcPos.z", "src": "srcPtr"}
        | {"dstX": "dstPos.x", "dstY": "dstPos.y", "dstZ": "dstPos.z", "dst": "dstPtr"}
        | {"width": "extent.width", "height": "extent.height", "depth": "extent.depth"},
    ),
    "struct cuda_copy_2d": ("CUDA_MEMCPY2D_v2", {}),
    "struct cuda_host_node": ("struct cudaHostNodeParams", {}),
    "struct cuda_memset_node": ("struct cudaMemsetParams", {}),
    "struct cuda_graph_instantiation": ("cudaGraphInstantiateParams", {}),
}
ONLY_LATER_THAN_12_1 = {"deviceNumaConfig", "deviceNumaId", "mpsEnabled", "hostNumaId", "gpuPciDeviceID"}
ONLY_LATER_THAN_12_1 |= {"gpuPciSubsystemID", "hostNumaMultinodeIpcSupported", "reserved"}


def fields(struct: str) -> list[str]:
    """The names of the fields of one of our structs, nested ones left out."""
    text = (SOURCES / "cuda_types.h").read_text()
    body = re.search(rf"{struct} {{(.*?)\n}};", text, re.S)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    body = re.sub(r"struct {.*?}", "nested", body, flags=re.S)
    body = re.sub(r"void \(\*(\w+)\)\(void \*\)", r"nested \1", body)
    found = []
    for line in re.sub(r"^#.*$", "", body, flags=re.M).split(";"):
        names = re.sub(r"^\s*((const|struct|unsigned|long)\s)*\w+\s", "", line.replace("\n", " "), count=1)
        found += [re.sub(r"[\s*]|\[\d+\]", "", name) for name in names.split(",") if name.strip()]
    return found


def test_every_struct_is_compared() -> None:
    declared = re.findall(r"^(struct \w+) {", (SOURCES / "cuda_types.h").read_text(), re.M)
    assert declared == list(STRUCTS)
    assert fields("struct cuda_dim3") == ["x", "y", "z"]
    assert {"name", "clockRate", "maxThreadsDim", "reserved"} <= set(fields("struct cuda_device_properties"))


@pytest.mark.skipif(not HEADERS, reason="VRAMPROBE_CUDA_HEADERS names no folder of NVIDIA's headers")
def test_sizes_and_offsets_are_nvidias(tmp_path: Path) -> None:
    version = int(re.search(r"define CUDART_VERSION\s+(\d+)", Path(HEADERS, "cuda_runtime_api.h").read_text())[1])
    major = version // 1000
    lines = []
    for ours, (theirs, renamed) in STRUCTS.items():
        lines.append(f'_Static_assert(sizeof({ours}) == sizeof({theirs}), "size of {ours}");')
        for field in fields(ours):
            other = renamed.get(field, field)
            old = version < 12020 and ours.endswith("device_properties") and field in ONLY_LATER_THAN_12_1
            if other is None and major < 13:  # 12.1 calls it reserved
                continue
            if old or (field == "reserved" and ours.endswith(("pool_properties", "pointer_attributes")) and major < 13):
                continue
            if ours.endswith("device_properties") and not_in(theirs, field, major):
                continue
            other = other or field
            lines.append(f'_Static_assert(offsetof({ours}, {field}) == offsetof({theirs}, {other}), "{ours}.{field}");')
    source = tmp_path / "compare.c"
    head = '#include <cuda.h>\n#include <cuda_runtime_api.h>\n#include <stddef.h>\n#include "cuda_types.h"\n'
    source.write_text(head + "\n".join(lines) + "\n")
    command = ["cc", "-std=c11", f"-DEMU_CUDA_MAJOR={major}", f"-I{HEADERS}", f"-I{SOURCES}", "-fsyntax-only", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    assert len(lines) > 150


def not_in(theirs: str, field: str, major: int) -> bool:
    """Tell whether a field stands only in the other major version's cudaDeviceProp."""
    gone = {"clockRate", "deviceOverlap", "kernelExecTimeoutEnabled", "computeMode", "maxTexture1DLinear"}
    gone |= {"memoryClockRate", "singleToDoublePrecisionPerfRatio", "cooperativeMultiDeviceLaunch"}
    return theirs == "struct cudaDeviceProp" and major >= 13 and field in gone


# For CUDA 13 the tests of the build compile it, too.
@pytest.mark.parametrize(
    ("compiler", "major"), grid(product(["cc", "clang", "zig"], [12, 13]), ("cc", 12), ("clang", 12))
)
def test_the_driver_compiles_without_a_warning(compiler: str, major: int, tmp_path: Path) -> None:
    command = [compiler]
    if compiler == "zig":
        pytest.importorskip("ziglang", reason="ziglang is not installed")
        command = [sys.executable, "-m", "ziglang", "cc"]
    elif not shutil.which(compiler):
        pytest.skip(f"no {compiler}")
    version = {12: 12010, 13: 13000}[major]
    command += ["-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += [f"-DEMU_CUDA_MAJOR={major}", f"-DEMU_CUDA_VERSION={version}", *map(str, sorted(SOURCES.glob("*.c")))]
    command += ["-o", str(tmp_path / "driver.so"), "-lpthread", "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    assert done.stderr == ""
