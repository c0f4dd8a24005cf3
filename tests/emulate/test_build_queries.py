"""The code of the stubs' answers: what a query writes, on the caller's side, by the calling convention."""

import ctypes
import subprocess
from ctypes import byref, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import pytest

from vramprobe.emulate.rules import generic_routines, rule_for
from vramprobe.emulate.stubs import assembly

SONAME = "libcusolver.so.12"
NAMES = """
    cusolverDnSgetrf_bufferSize cusolverDnXgeev_bufferSize cusolverDnSpotrfBatched cusolverDnSgesvdjBatched
    cusparseXbsrsv2_zeroPivot cublasSdot_v2 cublasSgelsBatched cusolverDnFrobnicate
""".split()  # noqa: SIM905
DRIVER = """
#include <string.h>
char last[80];
static long counted(const char *name) { strcpy(last, name); return 0; }
long emu_generic_counted(const char *name, const char *library) { return counted(name); }
long emu_generic_sized(const char *name, const char *library) { return counted(name); }
long emu_generic_unsupported(const char *name, const char *library, int code) { counted(name); return code; }
long emu_generic_on_device(const char *name, const char *library, int code, const void *result) {
  counted(name);
  return result ? code : 0;
}
long emu_generic_succeeds(const char *name, const char *library, int code, int *infos, int number) {
  for (int k = 0; k < number; k++) infos[k] = 0;
  return counted(name);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    """The stubs of a few functions over routines that note whom they served."""
    folder: Path = tmp_path_factory.mktemp("queries")
    exported = frozenset(generic_routines())
    functions = {name: rule_for(name, exported, SONAME) for name in NAMES}
    (folder / "stubs.s").write_text(assembly(functions, SONAME))
    (folder / "driver.c").write_text(DRIVER)
    out = folder / "stubs.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", out, folder / "stubs.s", folder / "driver.c"], check=True)
    return ctypes.CDLL(str(out))


def called(library: ctypes.CDLL) -> str:
    return (ctypes.c_char * 80).in_dll(library, "last").value.decode()


def test_a_size_in_a_register_is_0(library):
    size = c_int(77)
    assert library.cusolverDnSgetrf_bufferSize(None, 4, 4, None, 4, byref(size)) == 0
    assert (size.value, called(library)) == (0, "cusolverDnSgetrf_bufferSize")


def test_sizes_on_the_stack_are_0_and_a_place_may_be_missing(library):
    device, host = c_size_t(77), c_size_t(77)
    first = [None, None, 0, 0, c_int64(4), 0, None, c_int64(4), 0, None, 0, None, c_int64(4), 0, None, c_int64(4), 0]
    assert library.cusolverDnXgeev_bufferSize(*first, byref(device), byref(host)) == 0
    assert (device.value, host.value) == (0, 0)
    host.value = 77
    assert library.cusolverDnXgeev_bufferSize(*first, None, byref(host)) == 0
    assert host.value == 0


def test_each_of_a_batch_succeeds(library):
    infos = (c_int * 4)(7, 7, 7, 7)
    assert library.cusolverDnSpotrfBatched(None, 0, 4, None, 4, infos, 3) == 0
    assert list(infos) == [0, 0, 0, 7]
    infos = (c_int * 3)(7, 7, 7)
    words = [None, 0, 4, 4, None, 4, None, None, 4, None, 4, None, 0, infos, None, 2]
    assert library.cusolverDnSgesvdjBatched(*words) == 0
    assert list(infos) == [0, 0, 7]


def test_a_value_other_than_0(library):
    position = c_int(7)
    assert library.cusparseXbsrsv2_zeroPivot(None, None, byref(position)) == 0
    assert position.value == -1


def test_a_function_answers_the_host_and_the_device(library):
    info, infos = c_int(7), (c_int * 2)(7, 7)
    assert library.cublasSgelsBatched(None, 0, 4, 4, 1, None, 4, None, 4, byref(info), infos, 2) == 0
    assert (info.value, list(infos)) == (0, [0, 0])


def test_a_result_that_the_host_would_read_is_not_made_up(library):
    result = c_int(7)
    assert library.cublasSdot_v2(None, 4, None, 1, None, 1, byref(result)) == 9
    assert library.cublasSdot_v2(None, 4, None, 1, None, 1, c_void_p()) == 0
    assert result.value == 7


def test_what_is_not_known_returns_not_supported(library):
    assert library.cusolverDnFrobnicate(None) == 9
    assert called(library) == "cusolverDnFrobnicate"
