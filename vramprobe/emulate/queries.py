"""Define the answers to queries of NVIDIA's math libraries: one row a family, by the argument that receives the answer.

In: a function's name. Out: a Query, or None. Sizes of workspaces are not published, so they are 0 and are named among
the run's limits; a factorization's status is 0, which is success. What has no row and is no work on the device
is not answered: it returns its library's status "not supported", which torch raises as an exception.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

INT, LONG = 4, 8  # bytes of what is written


@dataclass(frozen=True, kw_only=True)
class Query:
    """The arguments (from 1) that a function writes ``value`` to, or the one that must be device memory or NULL."""

    arguments: tuple[int, ...] = ()
    num_bytes: int = INT
    value: int = 0
    is_size: bool = False  # 0 because nobody knows it: a limit of the run
    is_device_result: bool = False
    info: int | None = None  # the argument with the status on the device, 0 for success
    num_infos: int | None = None  # the argument with their number; None: one


_LETTER = "[SDCZ]"
# Sizes of workspaces: (functions, bytes of the number, arguments)
_SIZES = (
    # cuDNN
    (r"cudnnGetCTCLossWorkspaceSize", LONG, 9),
    (r"cudnnGetCTCLossWorkspaceSize_v8", LONG, 6),
    # cuFFT
    (r"cufftXtMakePlanMany", LONG, 13),
    # cuSOLVER
    (rf"cusolverDn{_LETTER}(geqrf|getrf|potrf|potri)_bufferSize", INT, 6),
    (rf"cusolverDn{_LETTER}gesvd_bufferSize", INT, 4),
    (rf"cusolverDn{_LETTER}gesvdj_bufferSize", INT, 13),
    (rf"cusolverDn{_LETTER}gesvdjBatched_bufferSize", INT, 12),
    (rf"cusolverDn{_LETTER}gesvdaStridedBatched_bufferSize", INT, 17),
    (rf"cusolverDn{_LETTER}(orgqr|ungqr)_bufferSize", INT, 8),
    (rf"cusolverDn{_LETTER}(ormqr|unmqr)_bufferSize", INT, 12),
    (rf"cusolverDn{_LETTER}(sy|he)ev(d|j|jBatched)_bufferSize", INT, 8),
    (rf"cusolverDn{_LETTER}sytrf_bufferSize", INT, 5),
    (r"cusolverDnX(potrf|getrf)_bufferSize", LONG, (9, 10)),
    (r"cusolverDnXgeqrf_bufferSize", LONG, (11, 12)),
    (r"cusolverDnX(syevd|syevBatched|sytrs)_bufferSize", LONG, (12, 13)),
    (r"cusolverDnXgesvd_bufferSize", LONG, (16, 17)),
    (r"cusolverDnXgeev_bufferSize", LONG, (18, 19)),
    # cuSPARSE and cuSPARSELt
    (rf"cusparse{_LETTER}bsrsv2_bufferSize", INT, 12),
    (rf"cusparse{_LETTER}bsrsm2_bufferSize", INT, 14),
    (rf"cusparse{_LETTER}csrgeam2_bufferSizeExt", LONG, 20),
    (r"cusparseX(coosort|csrsort)_bufferSizeExt", LONG, 7),
    (r"cusparse(SpMV|SpSV)_bufferSize", LONG, 10),
    (r"cusparse(SpMM|SDDMM|SpSM)_bufferSize", LONG, 11),
    (r"cusparseLtMatmulGetWorkspace", LONG, 3),
    (r"cusparseLtSpMMACompressedSize2", LONG, (3, 4)),  # torch takes the first from a rule of its own
)
# What the host is told of its arguments or of the values: (functions, argument, value)
_STATUSES = (
    (rf"cublas{_LETTER}geqrfBatched", 7, 0),
    (rf"cublas{_LETTER}getrsBatched", 10, 0),
    (rf"cusparseX(bsrsv2|bsrsm2)_zeroPivot|cusparse{_LETTER}(bsrsv2|bsrsm2)_zeroPivot", 3, -1),  # there is none
    (r"cusparseLtMatmulAlgGetAttribute", 4, 0),
    (r"cusparseLtMatmulSearch", (), 0),  # finds the algorithm in a descriptor of the library's
    (r"cublasGet(PointerMode|MathMode|AtomicsMode|SmCountTarget)(_v2)?", 2, 0),  # host, default, none, all
)
# Results of one number: on the device nobody computes them, on the host they would be garbage. (functions, argument)
_DEVICE_RESULTS = (
    (r"cublas([SD]dot|[CZ]dot[cu])_v2", 7),
    (r"cublas(([SD]|Sc|Dz)nrm2|([SD]|Sc|Dz)asum|I[sdcz]am(ax|in))_v2", 5),
    (r"cublasDotEx", 9),
)
# Factorizations and solvers, which succeed: (functions, argument with the status, argument with their number)
_INFOS = (
    (rf"cublas{_LETTER}getrfBatched", 6, 7),
    (rf"cublas{_LETTER}getriBatched", 8, 9),
    (rf"cublas{_LETTER}matinvBatched", 7, 8),
    (rf"cusolverDn{_LETTER}potrfBatched", 6, 7),
    (rf"cusolverDn{_LETTER}(sy|he)evjBatched", 10, 12),
    (rf"cusolverDn{_LETTER}gesvdjBatched", 14, 16),
    (rf"cusolverDn{_LETTER}gesvdaStridedBatched", 19, 21),
    (r"cusolverDnXsyevBatched", 16, 17),
    (rf"cusolverDn{_LETTER}(getrf|potrf|potri)", 8, None),
    (rf"cusolverDn{_LETTER}(geqrf|potrs|potrsBatched|sytrf)", 9, None),
    (rf"cusolverDn{_LETTER}(getrs|orgqr|ungqr|(sy|he)ev[dj])", 10, None),
    (rf"cusolverDn{_LETTER}(ormqr|unmqr)", 14, None),
    (rf"cusolverDn{_LETTER}gesvdj", 15, None),
    (rf"cusolverDn{_LETTER}gesvd", 16, None),
    (r"cusolverDnXpotrs", 12, None),
    (r"cusolverDnX(potrf|getrs)", 13, None),
    (r"cusolverDnXgetrf", 14, None),
    (r"cusolverDnXgeqrf", 15, None),
    (r"cusolverDnX(syevd|sytrs)", 16, None),
    (r"cusolverDnXgeev", 22, None),
    (r"cusolverDnXgesvd", 23, None),
)
# cuBLAS 15, cuDNN 3000 (8: 9), cuSPARSE 10, cuSOLVER 9, cuFFT 16; cuRAND has none, so its internal error
_NOT_SUPPORTED = {
    "libcublas": 15,
    "libcublasLt": 15,
    "libcudnn": 3000,
    "libcusparse": 10,
    "libcusparseLt": 10,
    "libcusolver": 9,
    "libcusolverMg": 9,
    "libcufft": 16,
    "libcurand": 999,
}


@cache
def _rows() -> tuple[tuple[re.Pattern[str], Query], ...]:
    found = []
    for names, num_bytes, arguments in _SIZES:
        found.append((names, Query(arguments=_several(arguments), num_bytes=num_bytes, is_size=True)))
    found += [(names, Query(arguments=_several(at), value=value)) for names, at, value in _STATUSES]
    found += [(names, Query(arguments=(argument,), is_device_result=True)) for names, argument in _DEVICE_RESULTS]
    found += [(names, Query(info=at, num_infos=number)) for names, at, number in _INFOS]
    found.append((rf"cublas{_LETTER}gelsBatched", Query(arguments=(10,), info=11, num_infos=12)))
    return tuple((re.compile(names), query) for names, query in found)


def _several(arguments: int | tuple[int, ...]) -> tuple[int, ...]:
    return arguments if isinstance(arguments, tuple) else (arguments,)


def query_of(name: str) -> Query | None:
    """Return the query of the function ``name``; None if it has no row."""
    return next((query for names, query in _rows() if names.fullmatch(name)), None)


def not_supported(soname: str) -> int | None:
    """The status by which a library says that it lacks a function; None if it has none, or is no math library."""
    return 9 if soname.startswith("libcudnn.so.8") else _NOT_SUPPORTED.get(soname.split(".so")[0])
