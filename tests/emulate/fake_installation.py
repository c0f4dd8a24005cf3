"""A site-packages as torch's wheels leave one, made of a few small libraries, with NVIDIA's packages beside or without.

``libtorch_cuda.so`` asks cudart for its version, and finds it by RPATH where the fake NVIDIA package is; the fake
driver answers for the emulated GPU.
"""

import subprocess
from pathlib import Path

VERSION = """from typing import Optional
__version__ = '2.13.0+cu130'
cuda: Optional[str] = '13.0'
hip: Optional[str] = None
"""
METADATA = "Name: torch\nRequires-Dist: nvidia-cudnn-cu13==9.20.0.48; x\nRequires-Dist: nvidia-nccl-cu13==2.29.7; x\n"
NVIDIAS_VERSION = 13999  # what the fake NVIDIA library answers; the emulated one answers 13000

CUDART = f"""
int cudaRuntimeGetVersion(int *v) {{ *v = {NVIDIAS_VERSION}; return 0; }}
int cudaDeviceSynchronize(void) {{ return 77; }}
int cudaStreamGetId(void *s, unsigned long long *id) {{ *id = 77; return 0; }}
"""
CUBLAS = "int cublasCreate_v2(void **h) { *h = (void *)77; return 0; }\nint cublasSgemm_v2(void) { return 77; }\n"
TORCH = """
int cudaRuntimeGetVersion(int *); int cudaDeviceSynchronize(void);
int cublasCreate_v2(void **); int cublasSgemm_v2(void);
int cudaStreamGetId(void *, unsigned long long *);
int torch_version(void) { int v = -1; cudaRuntimeGetVersion(&v); return v; }
int torch_wait(void) { return cudaDeviceSynchronize(); }
int torch_multiply(void) { void *h = 0; cublasCreate_v2(&h); return h ? cublasSgemm_v2() : -1; }
unsigned long long torch_stream(void) { unsigned long long id = 1; cudaStreamGetId(0, &id); return id; }
"""
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#define API __attribute__((visibility("default")))
API int emu_cudaRuntimeGetVersion(int *v) { *v = EMU_CUDA_VERSION; return 0; }
API int emu_cuInit(unsigned flags) { return flags ? 1 : 0; }
API int emu_nvmlInit_v2(void) { return 0; }
static int calls;
API long emu_generic_counted(const char *name, const char *soname) { calls++; return !name || !soname; }
API int emu_control_calls(void) { return calls; }
API long emu_generic_create_handle(void **out) { *out = &calls; return 0; }
API long emu_generic_unknown(const char *name, const char *soname) {
  fprintf(stderr, "vramprobe: %s of %s is not emulated\\n", name, soname);
  abort();
}
"""


def compile_library(
    out: Path, source: str, *options: str, soname: str | None = None, version: str | None = None
) -> None:
    """A shared library of ``source``; ``version`` names all its symbols' version."""
    out.parent.mkdir(parents=True, exist_ok=True)
    code = out.with_suffix(".c")
    code.write_text(source)
    extra = [f"-Wl,-soname,{soname}"] if soname else []
    if version:
        script = out.with_suffix(".map")
        script.write_text(f"{version} {{ global: *; }};\n")
        extra.append(f"-Wl,--version-script={script}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", out, code, *extra, *options], check=True, capture_output=True)
    for source_file in (code, out.with_suffix(".map")):
        source_file.unlink(missing_ok=True)


def write_torch(site: Path, version: str = VERSION, metadata: str = METADATA) -> Path:
    """The files that tell what torch is; no library."""
    (site / "torch" / "lib").mkdir(parents=True)
    (site / "torch" / "version.py").write_text(version)
    (site / "torch-2.13.0.dist-info").mkdir()
    (site / "torch-2.13.0.dist-info" / "METADATA").write_text(metadata)
    return site


def write_installation(site: Path, with_nvidia: bool = True) -> Path:
    """torch with its library, linked with NVIDIA's as their wheels lie; those are then kept or removed."""
    write_torch(site)
    nvidia = site / "nvidia" / "cu13" / "lib"
    cudart, cublas = nvidia / "libcudart.so.13", nvidia / "libcublas.so.13"
    compile_library(cudart, CUDART, soname="libcudart.so.13", version="libcudart.so.13")
    compile_library(cublas, CUBLAS, soname="libcublas.so.13", version="libcublas.so.13")
    rpath = "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../../nvidia/cu13/lib"
    torch = site / "torch" / "lib" / "libtorch_cuda.so"
    compile_library(torch, TORCH, str(cudart), str(cublas), rpath, soname=torch.name)
    if not with_nvidia:
        for path in nvidia.iterdir():
            path.unlink()
    return site
