"""Classify each function of NVIDIA's libraries: emulated, generic, answered, allowed, or unknown.

In: a function's name and what the driver defines. Out: a Rule. The allow-list names what leaves nothing for the host
to read: work on device memory, settings, destroyers, waits. A function that is in no list is unknown: what it would
have written (a size, a status, a handle, an address) must not be made up. One of a math library returns the status "not
supported" (queries.py), one of CUDA or NCCL ends the run.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum

from vramprobe.emulate.queries import Query, not_supported, query_of

PREFIX = "emu_"


class Kind(StrEnum):
    """Kind of effect of a function's call."""

    EMULATED = "emulated"  # the driver has it by name
    GENERIC = "generic"  # one of the driver's routines serves many of its form
    ANSWERED = "answered"  # writes what its row of queries.py says
    ALLOWED = "allowed"  # counted, returns 0: there is nothing that the host could read
    UNKNOWN = "unknown"  # returns "not supported" if its library has such a status, else ends the run with its name


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Target of a function's call: ``routine`` is a name that the driver exports."""

    kind: Kind
    routine: str
    query: Query | None = None


COUNTED = "emu_generic_counted"  # (name, soname) → 0
ENDS_THE_RUN = "emu_generic_unknown"  # (name, soname), does not return
UNSUPPORTED = "emu_generic_unsupported"  # (name, soname, status) → status
SIZED = "emu_generic_sized"  # (name, soname) → 0; names a size that is not known among the run's limits
SUCCEEDS = "emu_generic_succeeds"  # (name, soname, status, infos, number of them) → 0; they are 0
ON_DEVICE = "emu_generic_on_device"  # (name, soname, status, result) → 0, or the status where the host would read it

# Generic routines, by what the function writes. Where the driver lacks the routine the function is unknown.
_GENERIC = {
    # f(handle *out, ...): an opaque handle that only the library reads
    "emu_generic_create_handle": (
        r"cublas(Lt)?(Create(_v2)?|LtCreate|\w+(Desc|Preference|Layout)Create)",
        r"cudnnCreate(\w+Descriptor|\w+Plan)?",
        r"cusparseCreate(MatDescr|B?sr\w*Info|Coo|CooAoS|Csr|Csc|Bsr|BlockedEll|SlicedEll|DnMat|DnVec|SpVec|\w*Info)?",
        r"cusparseCreateConst(Coo|Csr|Csc|Bsr|BlockedEll|DnMat|DnVec|SpVec)",
        r"cusparseSp(GEMM|SV|SM|MMOp)_createDescr",
        r"cusolverDnCreate(Params|GesvdjInfo|SyevjInfo|IRSParams|IRSInfos)?",
        r"curandCreateGenerator(Host)?",
        r"cuptiSubscribe",
    ),
    # const char *f(...)
    "emu_generic_string": (
        r"(cudnn|cusparse|nccl|nvrtc|cufft|cusparseLt)Get(Error|Status)(String|Name)",
        r"(cublas|cublasLt)GetStatus(String|Name)",
        r"ncclGetLastError|cuFile_?op_status_error",
    ),
    # f(code, const char **out)
    "emu_generic_string_out_1": (r"cuptiGet(ResultString|ErrorMessage)",),
    # f(kind, uint64_t *out)
    "emu_generic_zero_out_1_long": (r"cuptiActivityPopExternalCorrelationId",),
}

_LETTER = "[SDCZ]"
# Functions that leave the host nothing to read, by library. Results and their status words (devInfo) are device memory.
_ALLOWED = (
    # cuBLAS: rotg writes to host memory, so is not here
    rf"cublas{_LETTER}(gemm|gemm3m|gemv|ger|geru|gerc|symm|hemm|syrk|herk|syr2k|her2k|syrkx|herkx|trmm|trsm|trsv|trmv"
    r"|symv|hemv|syr|her|syr2|her2|gbmv|sbmv|hbmv|tbmv|tbsv|spmv|hpmv|tpmv|tpsv|spr|hpr|spr2|hpr2|dgmm|geam"
    r"|axpy|copy|scal|swap|rot|rotm)(_v2)?(_64)?",
    rf"cublas{_LETTER}(gemm|gemv)(Strided|Grouped)?Batched(_64)?|cublas{_LETTER}trsmBatched(_64)?",
    r"cublas(Csrot|Zdrot|Csscal|Zdscal)(_v2)?(_64)?|cublas[SC]gemm(3m)?Ex(_64)?|cublas[SC](syrk|herk)(3m)?Ex(_64)?",
    r"cublas(Gemm(Strided|Grouped)?(Batched)?|Axpy|Scal|Rot)Ex(_64)?",
    r"cublasSet(Stream|Workspace|PointerMode|MathMode|AtomicsMode|SmCountTarget)(_v2)?|cublasDestroy(_v2)?",
    r"cublasLt(Matmul|MatrixTransform)|cublasLt\w*(Destroy|SetAttribute)",
    # cuDNN
    r"cudnn(Set|Destroy)\w+|cudnnDestroy",
    r"cudnn(BatchNormalization|Normalization|Activation|Pooling|Softmax|Dropout|SpatialTf|RNN|LRNCrossChannel"
    r"|DivisiveNormalization|MultiHeadAttn)\w*(Forward|Backward)(Ex|Data|Weights|Training|TrainingEx|Inference)?(_v8)?",
    r"cudnnConvolution(Forward|BiasActivationForward|BackwardData|BackwardFilter|BackwardBias)|cudnnCTCLoss(_v8)?",
    r"cudnn(AddTensor|ScaleTensor|OpTensor|ReduceTensor|TransformTensor(Ex)?|TransformFilter)|cudnnBackendExecute",
    # cuSPARSE: Nnz and the steps of SpGEMM answer sizes that depend on values, so are not here
    r"cusparse(Sp(MV|MM)|SDDMM)(_preprocess)?|cusparseSp(SV|SM)_(analysis|solve|updateMatrix)",
    rf"cusparse{_LETTER}(bsrmm|bsrmv|bsrsm2_(analysis|solve)|bsrsv2_(analysis|solve)|csrgeam2)",
    r"cusparseX(coo2csr|csr2coo|coosortByRow|coosortByColumn|csrsort|cscsort)|cusparseCreateIdentityPermutation",
    r"cusparseSet(Stream|PointerMode|Mat(DiagType|FillMode|IndexBase|Type))|cusparseDestroy\w*",
    r"cusparse(SpMat|DnMat|DnVec|Coo|Csr|Csc|Bsr)Set(Attribute|Pointers|StridedBatch|Values)",
    r"cusparseSp(GEMM|SV|SM)_destroyDescr",
    # cuSOLVER; what says on the device whether it succeeded is in queries.py
    rf"cusolverDn{_LETTER}(gebrd|(sy|he)trd|sytri)|cusolverDnXtrtri",
    r"cusolverDn(SetStream|Destroy\w*|SetDeterministicMode)|cusolverDnX(gesvdj|syevj)Set\w+",
    # cuFFT, cuRAND, cuSPARSELt (its descriptors are the caller's memory, read by the library alone)
    r"cufft(Destroy|SetAutoAllocation|SetStream|SetWorkArea|XtExec|Exec(C2C|R2C|C2R|Z2Z|D2Z|Z2D))",
    r"curand(Destroy\w+|Set\w+|Generate(|Long|LongLong|Uniform|UniformDouble|Normal|NormalDouble|LogNormal|Poisson))",
    r"cusparseLt(Init|Destroy|(Dense|Structured)DescriptorInit|MatDescriptorDestroy|Matmul|MatmulDescriptorInit"
    r"|MatmulDescSetAttribute|MatmulAlgSelectionInit|MatmulAlgSetAttribute|MatmulPlan(Init|Destroy)|SpMMACompress2?)",
    # NCCL: collectives are the driver's or nobody's
    r"ncclComm(Destroy|Abort|Finalize|Deregister|WindowDeregister)|ncclRedOpDestroy|ncclGroup(Start|End)",
    # NVRTC, profiling, marks: nothing is recorded, so nothing is delivered
    r"nvrtc(AddNameExpression|DestroyProgram|CompileProgram)|nvtx\w+",
    r"cuptiActivity(Enable\w*|Disable|FlushAll|RegisterCallbacks|RegisterTimestampCallback|SetAttribute"
    r"|PushExternalCorrelationId)|cupti(EnableCallback|EnableDomain|EnableAllDomains|Unsubscribe|Finalize)",
    r"cuFile(Buf|Handle)Deregister|nvshmem_free|nvshmemid_hostlib_finalize",
    # CUDA's runtime and driver: settings, waits, hints
    r"__cuda(RegisterFatBinaryEnd|UnregisterFatBinary|RegisterVar|RegisterManagedVar)",
    r"cudaProfiler(Start|Stop)|cuProfiler(Start|Stop)|cuLogsUnregisterCallback",
    r"cuda(Device|Stream|Event)Synchronize|cudaStreamWaitEvent|cudaCtxResetPersistingL2Cache|cudaStreamSetAttribute",
    r"cudaFuncSet(Attribute|CacheConfig|SharedMemConfig)|cudaKernelSetAttributeForDevice",
    r"cudaDevice(EnablePeerAccess|DisablePeerAccess|SetLimit|SetCacheConfig|SetSharedMemConfig)|cudaSetDeviceFlags",
    r"cudaMem(Advise|PrefetchAsync|PoolSetAccess)(_v2)?|cudaStreamAttachMemAsync",
    r"cudaGraph(Launch|Upload|Destroy|ExecDestroy|DebugDotPrint)|cudaUserObjectRelease|cudaLibraryUnload",
    r"cu(Ctx|Stream|Event)Synchronize|cuStreamWaitEvent|cuCtxSet(Limit|CacheConfig|SharedMemConfig|Flags)",
    r"cuFuncSet(Attribute|CacheConfig|SharedMemConfig)|cuKernelSet(Attribute|CacheConfig)|cuModuleUnload|cuLibraryUnload",
    r"cuMem(Advise|PrefetchAsync)(_v2)?|cuLinkDestroy|cuCtxResetPersistingL2Cache|cuGraph(Launch|Upload)",
)
_ALLOWED_NAME = re.compile("|".join(f"(?:{pattern})" for pattern in _ALLOWED))
_GENERIC_NAMES = {routine: re.compile("|".join(patterns)) for routine, patterns in _GENERIC.items()}


def rule_for(name: str, exported: Set[str], soname: str = "") -> Rule:
    """Return the rule of a call of ``name`` in the library ``soname``, with a driver that exports the names in
    ``exported``.
    """
    unknown = Rule(kind=Kind.UNKNOWN, routine=ENDS_THE_RUN if not_supported(soname) is None else UNSUPPORTED)
    if PREFIX + name in exported:
        return Rule(kind=Kind.EMULATED, routine=PREFIX + name)
    for routine, names in _GENERIC_NAMES.items():
        if names.fullmatch(name):
            return Rule(kind=Kind.GENERIC, routine=routine) if routine in exported else unknown
    if query := query_of(name):
        routine = ON_DEVICE if query.is_device_result else SIZED if query.is_size else COUNTED
        routine = SUCCEEDS if query.info is not None else routine
        return Rule(kind=Kind.ANSWERED, routine=routine, query=query)
    if _ALLOWED_NAME.fullmatch(name):
        return Rule(kind=Kind.ALLOWED, routine=COUNTED)
    return unknown


def generic_routines() -> tuple[str, ...]:
    """The routines that a driver must export for every rule to hold."""
    return (*_GENERIC_NAMES, COUNTED, ENDS_THE_RUN, UNSUPPORTED, SIZED, SUCCEEDS, ON_DEVICE)
