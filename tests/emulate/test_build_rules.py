"""Rules for each function: none whose answer the host reads is merely counted."""

import re

import pytest

from vramprobe.catalog.shipped import data_file
from vramprobe.emulate.queries import not_supported, query_of
from vramprobe.emulate.rules import (
    COUNTED,
    ENDS_THE_RUN,
    ON_DEVICE,
    SIZED,
    SUCCEEDS,
    UNSUPPORTED,
    Kind,
    generic_routines,
    rule_for,
)
from vramprobe.emulate.symbols import library_of_symbol

DRIVER = frozenset({*generic_routines(), "emu_cudaMalloc"})
# Every function that torch 2.4.1 and 2.13.0, bitsandbytes and Triton want, by what must become of it. A writer's name
# says that it answers; those below are the ones whose names do not.
WRITERS_BY_OTHER_NAMES = re.findall(
    r"\w+",
    """
cublasSrotg_v2 cublasDrotmg_v2 cublasNrm2Ex cudnnFindConvolutionForwardAlgorithmEx cusolverDnXgesvdp
cusparseSpGEMM_workEstimation cusparseSpGEMM_compute cusparseXcsrgeam2Nnz cusparseSpMatGetSize
ncclCommInitRank ncclAllReduce ncclSend ncclMemAlloc ncclCommSplit nvshmem_malloc nvshmemid_init_status cuFileRead
cudaMalloc cudaHostRegister cudaStreamCreate cudaEventElapsedTime cudaMemcpy cudaMemset cudaStreamIsCapturing
cudaStreamEndCapture cudaGraphInstantiate cudaIpcOpenMemHandle cuMemAlloc_v2 cuMemcpyDtoH_v2 cuCtxPopCurrent_v2
cuModuleLoadData cuOccupancyMaxActiveBlocksPerMultiprocessor cuTensorMapEncodeTiled cudaOccupancyMaxActiveClusters
cublasGetMatrixAsync cublasSetVectorAsync cudaLaunchHostFunc cudaMallocManaged cuMemMap cuMemCreate
""",
)
COMPUTED = re.findall(
    r"\w+",
    """
cublasSgemm_v2 cublasGemmEx cublasGemmStridedBatchedEx cublasLtMatmul cublasStrsmBatched
cudnnConvolutionForward cudnnConvolutionBackwardFilter cudnnBatchNormalizationForwardTrainingEx cudnnRNNForward
cudnnBatchNormalizationBackwardEx cudnnBatchNormalizationForwardInference cudnnRNNBackwardData_v8 cudnnPoolingForward
cudnnRNNBackwardWeights_v8 cudnnBackendExecute cudnnSetTensorNdDescriptor cudnnCTCLoss_v8 cusparseSpMM cusparseSDDMM
cusparseCreateIdentityPermutation cusparseXcoo2csr cusparseSpSV_analysis cusolverDnXtrtri cufftXtExec
cusparseLtMatmul nvtxRangePushA cudaProfilerStart cudaStreamWaitEvent
cudaFuncSetAttribute __cudaRegisterVar cuFuncSetCacheConfig cuptiActivityEnable cudnnDestroyTensorDescriptor
""",
)


def test_what_the_driver_has_wins_over_every_rule():
    exported = DRIVER | {"emu_cublasSgemm_v2"}
    assert rule_for("cublasSgemm_v2", exported).kind is Kind.EMULATED
    assert rule_for("cublasSgemm_v2", exported).routine == "emu_cublasSgemm_v2"


@pytest.mark.parametrize("name", WRITERS_BY_OTHER_NAMES)
def test_what_answers_the_host_ends_the_run(name):
    assert rule_for(name, DRIVER - {f"emu_{name}"}).routine == ENDS_THE_RUN


@pytest.mark.parametrize("name", COMPUTED)
def test_what_leaves_nothing_to_read_is_counted(name):
    assert rule_for(name, DRIVER).routine == COUNTED


@pytest.mark.parametrize(
    ("name", "routine"),
    [
        ("cublasSdot_v2", ON_DEVICE),
        ("cublasIsamax_v2", ON_DEVICE),
        ("cudnnGetCTCLossWorkspaceSize", SIZED),
        ("cusolverDnXgeev_bufferSize", SIZED),
        ("cufftXtMakePlanMany", SIZED),
        ("cusolverDnSpotrf", SUCCEEDS),
        ("cusolverDnCheevjBatched", SUCCEEDS),
        ("cublasSgetrfBatched", SUCCEEDS),
        ("cusparseXbsrsv2_zeroPivot", COUNTED),
    ],
)
def test_a_query_has_a_row(name, routine):
    assert rule_for(name, DRIVER).kind is Kind.ANSWERED
    assert rule_for(name, DRIVER).routine == routine


def test_rows_do_not_overlap():
    """A function has one row: each that torch, MAGMA and bitsandbytes want was written from its own signature."""
    from vramprobe.emulate import queries

    names = [
        f"cusolverDn{letter}{name}" for letter in "SDCZX" for name in ("gesvd", "gesvdj", "syevd", "potrf", "getrs")
    ]
    names += [
        "cublasSgelsBatched",
        "cublasSgetrsBatched",
        "cusparseSbsrsm2_bufferSize",
        "cudnnGetCTCLossWorkspaceSize_v8",
    ]
    found = {name: sum(pattern.fullmatch(name) is not None for pattern, _ in queries._rows()) for name in names}
    assert max(found.values()) == 1


def test_a_math_library_says_that_it_lacks_a_function_and_cuda_ends_the_run():
    assert rule_for("cusparseSpGEMM_compute", DRIVER, "libcusparse.so.12").routine == UNSUPPORTED
    assert rule_for("cudaMalloc3DArray", DRIVER, "libcudart.so.13").routine == ENDS_THE_RUN
    assert (not_supported("libcudnn.so.9"), not_supported("libcudnn.so.8")) == (3000, 9)
    assert not_supported("libnccl.so.2") is None


def test_a_size_that_is_not_known_is_named_and_a_success_is_not():
    assert query_of("cusolverDnSgesvd_bufferSize").is_size
    assert not query_of("cublasSgetrsBatched").is_size
    assert query_of("cublasFrobnicate") is None


def test_a_handle_is_created_where_the_function_takes_one():
    for name in """
        cublasCreate_v2 cublasLtMatmulDescCreate cudnnCreate cudnnCreateTensorDescriptor cusparseCreateCsr
        cusparseSpMMOp_createDescr cusolverDnCreateParams
    """.split():  # noqa: SIM905
        assert rule_for(name, DRIVER).routine == "emu_generic_create_handle", name


def test_a_routine_that_the_driver_lacks_makes_its_functions_unknown():
    assert rule_for("cublasCreate_v2", frozenset()).kind is Kind.UNKNOWN


def test_a_function_that_nobody_knows_is_unknown():
    assert rule_for("cublasFrobnicate", DRIVER).routine == ENDS_THE_RUN


ANSWERS = re.compile(
    r"Get(?!MatrixAsync)|Query|[bB]uffer_?Size|WorkspaceSize|Create|Alloc|Find|Search|Nnz|Estimation|Version|Import|Export"
    r"|Malloc|Open|IsCapturing|Elapsed|Occupancy|Instantiate|Capture|Register(?!Var|Managed|Fat|Callbacks|Timestamp)"
)


def test_no_function_of_cuda_whose_name_says_that_it_answers_is_counted():
    names = [line for line in data_file("cuda_functions.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(names) > 800
    counted = [name for name in names if rule_for(name, DRIVER).kind is Kind.ALLOWED]
    assert len(counted) > 40
    assert [name for name in counted if ANSWERS.search(name)] == []


def test_the_listed_functions_are_cudas():
    names = [line for line in data_file("cuda_functions.txt").read_text().splitlines() if not line.startswith("#")]
    assert {library_of_symbol(name) for name in names} == {"libcuda", "libcudart"}
    assert names == sorted(set(names))
