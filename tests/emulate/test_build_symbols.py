"""Needs of ELF files: sonames, versions, names; each file is read once."""

import json
import os

import fake_installation
from fake_installation import compile_library

from vramprobe.emulate import symbols
from vramprobe.emulate.symbols import library_of, library_of_symbol, wanted


def test_a_library_tells_its_needs_by_soname_with_their_versions(installation):
    needs = wanted(installation)
    cudart = needs["libcudart.so.13"]
    assert cudart.versions == dict.fromkeys(
        ["cudaRuntimeGetVersion", "cudaDeviceSynchronize", "cudaStreamGetId"], "libcudart.so.13"
    )
    assert cudart.files == {"libtorch_cuda.so"}
    assert set(needs["libcublas.so.13"].versions) == {"cublasCreate_v2", "cublasSgemm_v2"}
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= set(needs)


def test_a_file_for_another_cuda_wants_nothing(installation, tmp_path):
    old = tmp_path / "old" / "libcudart.so.12"
    compile_library(old, fake_installation.CUDART, soname="libcudart.so.12")
    compile_library(
        installation.site_packages[0] / "bnb" / "libbnb_cuda12.so",
        "int cudaDeviceSynchronize(void);\nint wait12(void) { return cudaDeviceSynchronize(); }",
        str(old),
    )
    assert "libcudart.so.12" not in wanted(installation)


def test_a_copy_of_a_library_that_a_wheel_brings_under_a_name_of_its_own_is_replaced(installation, tmp_path):
    site = installation.site_packages[0]
    for bundled, name in (
        ("vision.libs", "libcudart.faf08d9a.so.13"),
        ("codec.libs", "libcudart-c64a25f3.so.12.3.101"),
    ):
        compile_library(site / bundled / name, fake_installation.CUDART, soname=name)
        code = "int cudaDeviceSynchronize(void);\nint wait_for_it(void) { return cudaDeviceSynchronize(); }"
        compile_library(site / bundled.split(".")[0] / "_C.so", code, str(site / bundled / name))
    needs = wanted(installation)
    assert needs["libcudart.faf08d9a.so.13"].versions == {"cudaDeviceSynchronize": None}
    assert "libcudart-c64a25f3.so.12.3.101" not in needs  # of another CUDA


def test_an_extension_without_a_needed_entry_is_placed_by_its_names(installation):
    site = installation.site_packages[0]
    code = "int torch_wait(void); int cudaFree(void *); int f(void) { return torch_wait() + cudaFree(0); }"
    compile_library(site / "ext" / "ext.so", code, str(site / "torch" / "lib" / "libtorch_cuda.so"))
    assert wanted(installation)["libcudart.so.13"].versions["cudaFree"] is None


def test_a_file_is_read_again_only_when_it_changed(installation, tmp_path, monkeypatch):
    cache = tmp_path / "symbols.json"
    first = wanted(installation, cache)
    monkeypatch.setattr(symbols, "read_file", lambda path: (_ for _ in ()).throw(AssertionError(f"read {path}")))
    assert wanted(installation, cache) == first
    monkeypatch.undo()
    library = installation.site_packages[0] / "torch" / "lib" / "libtorch_cuda.so"
    os.utime(library, (1, 1))
    read = []
    monkeypatch.setattr(symbols, "read_file", lambda path: read.append(path) or symbols.FileWants())
    wanted(installation, cache)
    assert read == [library]


def test_a_broken_cache_is_no_cache(installation, tmp_path):
    cache = tmp_path / "symbols.json"
    for text in ("{", json.dumps({"format": -1})):
        cache.write_text(text)
        assert "libcudart.so.13" in wanted(installation, cache)


def test_what_is_no_elf_file_wants_nothing(installation):
    (installation.site_packages[0] / "broken.so").write_bytes(b"\x7fELF and no more")
    (installation.site_packages[0] / "text.so").write_text("text")
    assert "libcudart.so.13" in wanted(installation)


def test_a_function_belongs_to_the_library_of_its_longest_prefix():
    for name, library in {
        "cublasLtMatmul": "libcublasLt",
        "cublasSgemm_v2": "libcublas",
        "cudaMalloc": "libcudart",
        "__cudaRegisterVar": "libcudart",
        "cuMemAlloc_v2": "libcuda",
        "cudnnCreate": "libcudnn",
        "cusparseLtInit": "libcusparseLt",
        "cuptiSubscribe": "libcupti",
        "cuFileRead": "libcufile",
        "ncclAllReduce": "libnccl",
        "nvmlInit_v2": "libnvidia-ml",
    }.items():
        assert library_of_symbol(name) == library
    assert library_of_symbol("malloc") is None
    assert library_of_symbol("curl_easy_init") is None
    for name in ("libcudart.so.13", "libcudart.faf08d9a.so.13", "libcudart-c64a25f3.so.12.3.101"):
        assert library_of(name) == "libcudart"
    assert library_of("libnvidia-ml.so.1") == "libnvidia-ml"
