"""A CUDA build of torch itself, where there is one: `vramprobe emulate setup`, or $VRAMPROBE_CUDA_PYTHONS."""

import csv
import re
import subprocess
from collections import Counter

import pytest

pytest.importorskip("elftools", reason="needs pyelftools: pip install 'vramprobe[emulate]'")

from vramprobe.emulate.activate import emulated_environment
from vramprobe.emulate.rules import ENDS_THE_RUN, generic_routines
from vramprobe.emulate.stubs import exported_names
from vramprobe.emulate.symbols import library_of

ANSWERS = re.compile(r"Get(?!MatrixAsync)|Query|[bB]ufferSize|WorkspaceSize|Find|Search|Nnz$|Estimation|(?<!Auto)Alloc")
LIBRARIES = """
import ctypes, pathlib, sys
import torch
print(torch.version.cuda, torch.backends.cuda.is_built())
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(*sorted({pathlib.Path(path).parent.name for path in loaded if "/libcud" in path or "/libcublas" in path}))
"""


def test_every_generic_routine_is_in_the_driver(cuda_build):
    assert set(generic_routines()) <= exported_names(cuda_build.driver)


def test_no_function_that_answers_is_merely_counted(cuda_build):
    with cuda_build.functions.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["function"] for row in rows if row["kind"] == "allowed" and ANSWERS.search(row["function"])] == []


#: Results that only a GPU computes, and that the host reads: the numbers of a product's entries, a rotation.
NOT_KNOWN = re.compile(
    r"cublas[SDCZ]rotm?g_v2|cusparseSpGEMM_(compute|copy|workEstimation)|cusparse(SpMatGetSize|Xcsrgeam2Nnz)"
)
MATH = re.compile(r"libcu(blas|blasLt|dnn|fft|rand|solver|sparse|sparseLt)\.")


def test_no_function_of_a_math_library_ends_the_run(cuda_build):
    """Each that torch imports succeeds, answers, or returns "not supported", which torch raises with its name."""
    with cuda_build.functions.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if MATH.match(row["soname"])]
    assert len(rows) > 400
    assert [row["function"] for row in rows if row["routine"] == ENDS_THE_RUN] == []
    unknown = [row["function"] for row in rows if row["kind"] == "unknown"]
    assert [name for name in unknown if not NOT_KNOWN.fullmatch(name)] == []


def test_the_libraries_are_those_of_this_cuda_and_most_of_cuda_itself_is_emulated(cuda_build):
    with cuda_build.functions.open(newline="") as file:
        kinds = Counter((library_of(row["soname"]), row["kind"]) for row in csv.DictReader(file))
    major = cuda_build.installation.cuda[0]
    sonames = {path.name for path in cuda_build.stubs}
    assert {f"libcudart.so.{major}", f"libcublas.so.{major}", "libcuda.so.1", "libnccl.so.2"} <= sonames
    assert not any(name.startswith("libcudart") and name != f"libcudart.so.{major}" for name in sonames)
    assert kinds["libcudart", "emulated"] >= 80
    assert kinds["libcublas", "allowed"] >= 100


def test_torch_loads_with_the_built_libraries_and_no_other(cuda_build, tmp_path):
    environment = emulated_environment(cuda_build, tmp_path)
    command = [cuda_build.installation.python, "-c", LIBRARIES]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    cuda, folders = done.stdout.splitlines()
    assert cuda == f"{cuda_build.installation.cuda[0]}.{cuda_build.installation.cuda[1]} True"
    assert folders == cuda_build.folder.name
