"""Answers of the cards: visible devices, properties, errors, NVML, and a machine that cannot be."""

import ctypes
import struct
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

import pytest
from driver_client import CudaError, Driver
from driver_process import on_card

from vramprobe.emulate.machine import device_uuid, read_events

MIB = 1 << 20


def buses(driver: Driver) -> list[int]:
    """PCI bus numbers, counted from 1 in the machine's order, by CUDA ordinal; empty where CUDA sees no device."""
    count = c_int()
    code = driver.call("cudaGetDeviceCount", byref(count))
    assert code == (0 if count.value else 100)
    return [driver.number("cudaDeviceGetAttribute", 33, device) for device in range(count.value)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [1, 2, 3, 4]),
        ("", []),
        ("0", [1]),
        ("2,0", [3, 1]),
        (" 1 , 3 ", [2, 4]),
        ("0,9,1", [1]),  # the first that is none hides what follows
        ("-1", []),
        ("1,-1,2", [2]),
        ("NoDevFiles", []),
        ("0,0", []),  # named twice: CUDA sees none
    ],
)
def test_cuda_visible_devices(visible: str | None, expected: list[int], make_machine, in_process) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert in_process(buses, make_machine(num_devices=4), **environment) == expected


def test_cuda_visible_devices_by_uuid(make_machine, in_process) -> None:
    machine = make_machine(num_devices=4)
    whole, start = device_uuid(machine, 2), device_uuid(machine, 1)[:12]
    assert in_process(buses, machine, CUDA_VISIBLE_DEVICES=f"{whole},{start},0") == [3, 2, 1]
    assert in_process(buses, machine, CUDA_VISIBLE_DEVICES="GPU-zzzz,0") == []
    assert in_process(buses, machine, CUDA_VISIBLE_DEVICES="GPU-") == [], "a beginning must name one card"


def test_cuda_device_order(make_machine, in_process) -> None:
    machine = make_machine(num_devices=3)
    path = machine / "machine.txt"
    head, *devices = path.read_text().split("device ")
    devices[2] = devices[2].replace("sm_count 108", "sm_count 132")
    path.write_text("device ".join([head, *devices]))
    assert in_process(buses, machine) == [3, 1, 2], "the fastest first"
    assert in_process(buses, machine, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1, 2, 3]
    assert in_process(buses, machine, CUDA_VISIBLE_DEVICES="1") == [1], "numbers are of CUDA's order"


def test_the_device_is_charged_whatever_its_ordinal(make_machine, in_process) -> None:
    def run(driver: Driver) -> list[int]:
        driver.malloc(10 * MIB)
        return [driver.nvml_used(index) // MIB - 100 for index in range(3)]

    assert in_process(run, make_machine(num_devices=3), CUDA_VISIBLE_DEVICES="2") == [0, 0, 110]


@on_card(returns=[120, 110, 101, 0], num_devices=2)
def test_each_device_has_its_own_memory(driver: Driver) -> list[int]:
    driver.malloc(10 * MIB)
    driver.check("cudaSetDevice", 1)
    driver.malloc(20 * MIB)
    seen = [driver.used() // MIB]
    driver.check("cudaSetDevice", 0)
    wrong = driver.call("cudaSetDevice", 2)
    return [*seen, driver.used() // MIB, wrong, driver.number("cudaGetDevice")]


@on_card()
def test_error_names_and_texts(driver: Driver) -> None:
    def name(code: int) -> str:
        return driver.call("cudaGetErrorName", code).decode()

    def text(code: int) -> str:
        return driver.call("cudaGetErrorString", code).decode()

    assert (name(0), text(0)) == ("cudaSuccess", "no error")
    assert (name(2), text(2)) == ("cudaErrorMemoryAllocation", "out of memory")
    assert (name(3), text(3)) == ("cudaErrorInitializationError", "initialization error")
    assert (name(700), text(700)) == ("cudaErrorIllegalAddress", "an illegal memory access was encountered")
    assert (name(98), text(98)) == ("cudaErrorInvalidDeviceFunction", "invalid device function")
    assert (name(12345), text(12345)) == ("unrecognized error code",) * 2
    out = ctypes.c_char_p()
    driver.check("cuGetErrorName", 2, byref(out))
    assert out.value == b"CUDA_ERROR_OUT_OF_MEMORY"
    driver.check("cuGetErrorString", 201, byref(out))
    assert out.value == b"invalid device context"
    assert driver.call("cuGetErrorName", 12345, byref(out)) == 1


@on_card(returns=[0, 201, 0, 0, 0, 0])
def test_the_driver_api_needs_a_context_where_the_runtime_makes_one(driver: Driver) -> list[int]:
    out, context = c_void_p(), c_void_p()
    codes = [driver.call("cuInit", 0), driver.call("cuMemAlloc_v2", byref(out), c_size_t(10))]
    codes += [driver.call("cuCtxGetCurrent", byref(context)), context.value or 0]
    driver.check("cuDevicePrimaryCtxRetain", byref(context), 0)
    driver.check("cuCtxSetCurrent", context)
    return [*codes, driver.call("cuMemAlloc_v2", byref(out), c_size_t(10)), driver.call("cuMemFree_v2", out)]


@on_card(returns=[(2, 1), (1, 1), (3, 1), (0, -2), (1, 1), (0, -2)], num_devices=2)
def test_kinds_of_pointers(driver: Driver) -> list[tuple[int, int]]:
    def kind(driver: Driver, pointer: int) -> tuple[int, int]:
        words = (c_int * 64)()
        driver.check("cudaPointerGetAttributes", words, c_void_p(pointer))
        return words[0], words[1]

    driver.check("cudaSetDevice", 1)
    own = (ctypes.c_char * 100)()
    pointers = [driver.malloc(100) + 50, driver.pointer("cudaMallocHost", c_size_t(100))]
    pointers += [driver.pointer("cudaMallocManaged", c_size_t(100), 1), ctypes.addressof(own)]
    seen = [kind(driver, pointer) for pointer in pointers]
    driver.check("cudaHostRegister", own, c_size_t(100), 0)
    assert driver.call("cudaHostRegister", own, c_size_t(100), 0) == 712
    seen.append(kind(driver, pointers[-1] + 99))
    driver.check("cudaHostUnregister", own)
    assert driver.call("cudaHostUnregister", own) == 713
    driver.check("cudaFree", c_void_p(pointers[2]))
    return [*seen, kind(driver, pointers[-1])]


@on_card()
def test_streams_events_and_host_functions(driver: Driver) -> None:
    stream = driver.pointer("cudaStreamCreateWithPriority", c_uint(1), -3)
    priority, flags = c_int(), c_uint()
    driver.check("cudaStreamGetPriority", c_void_p(stream), byref(priority))
    driver.check("cudaStreamGetFlags", c_void_p(stream), byref(flags))
    assert (priority.value, flags.value) == (-3, 1)
    timed, untimed = driver.pointer("cudaEventCreate"), driver.pointer("cudaEventCreateWithFlags", c_uint(2))
    milliseconds = ctypes.c_float()

    def elapsed(a: int, b: int) -> int:
        return driver.call("cudaEventElapsedTime", byref(milliseconds), c_void_p(a), c_void_p(b))

    assert elapsed(timed, timed) == 400, "not recorded"
    driver.check("cudaEventRecord", c_void_p(timed), c_void_p(stream))
    driver.check("cudaEventRecord", c_void_p(untimed), c_void_p(stream))
    assert (elapsed(timed, timed), elapsed(timed, untimed)) == (0, 400)
    called = []
    callback = ctypes.CFUNCTYPE(None, c_void_p)(called.append)
    driver.check("cudaLaunchHostFunc", c_void_p(stream), callback, c_void_p(42))
    assert called == [42]
    driver.check("cudaStreamDestroy", c_void_p(stream))


@on_card(graph_bytes=0, graph_node_bytes=0)
def test_a_graph_does_its_work_at_its_launch(driver: Driver) -> None:
    stream, other = driver.pointer("cudaStreamCreate"), driver.pointer("cudaStreamCreate")
    event, pointer, called = driver.pointer("cudaEventCreate"), driver.malloc(100), []
    callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda argument: called.append(1))
    driver.check("cudaStreamBeginCapture", c_void_p(stream), 2)
    source = ctypes.create_string_buffer(b"captured")
    driver.check("cudaMemcpyAsync", c_void_p(pointer), source, c_size_t(8), 1, c_void_p(stream))
    driver.check("cudaEventRecord", c_void_p(event), c_void_p(stream))
    driver.check("cudaStreamWaitEvent", c_void_p(other), c_void_p(event), c_uint(0))
    driver.check("cudaLaunchHostFunc", c_void_p(other), callback, c_void_p(0))
    before = driver.call("control_launches")
    assert driver.launch(stream) == 0
    pooled = driver.malloc_async(40 * MIB, stream)
    driver.free_async(pooled, stream)
    graph, count = c_void_p(), c_size_t()
    driver.check("cudaStreamEndCapture", c_void_p(stream), byref(graph))
    driver.check("cudaGraphGetNodes", graph, c_void_p(0), byref(count))
    assert (count.value, called, driver.is_computed(pointer, 8)) == (5, [], False)
    assert driver.call("control_launches") == before
    instance = driver.pointer("cudaGraphInstantiateWithFlags", graph, c_uint64(0))
    for _ in range(2):
        driver.check("cudaGraphLaunch", c_void_p(instance), c_void_p(stream))
    assert (len(called), driver.read(pointer, 8)) == (2, b"captured")
    assert driver.call("control_launches") == before + 2
    used = driver.used()
    driver.check("cudaGraphDestroy", graph)
    assert driver.used() == used, "the instance still holds the memory"
    assert driver.call("control_graph_bytes") == 0
    driver.check("cudaGraphExecDestroy", c_void_p(instance))
    driver.check("cudaDeviceGraphMemTrim", 0)
    assert driver.used() == used - 64 * MIB


@on_card(returns=[12 * MIB + 2 * 16 * MIB, 16 * MIB, 44 * MIB, 2], graph_bytes=10 * MIB, graph_node_bytes=MIB)
def test_each_instance_of_a_graph_holds_memory_by_its_nodes(driver: Driver) -> list[int]:
    inner, outer = driver.pointer("cudaGraphCreate", c_uint(0)), driver.pointer("cudaGraphCreate", c_uint(0))
    for graph, num in ((inner, 2), (outer, 3)):
        for _ in range(num):
            driver.pointer("cudaGraphAddEmptyNode", c_void_p(graph), c_void_p(0), c_size_t(0))
    driver.pointer("cudaGraphAddChildGraphNode", c_void_p(outer), c_void_p(0), c_size_t(0), c_void_p(inner))
    free = driver.info()[0]
    instances = [
        driver.pointer("cudaGraphInstantiateWithFlags", c_void_p(one), c_uint64(0)) for one in (inner, outer, outer)
    ]
    taken = [free - driver.info()[0]]
    for instance in instances[:2]:
        driver.check("cudaGraphExecDestroy", c_void_p(instance))
    taken.append(free - driver.info()[0])
    driver.malloc(free - taken[1] - 3 * MIB)  # which leaves less than an instance needs
    code = driver.call("cudaGraphInstantiateWithFlags", byref(c_void_p()), c_void_p(outer), c_uint64(0))
    return [*taken, driver.call("control_graph_bytes"), code]


def a_cubin(*sections: str) -> bytes:
    """An ELF of empty sections with these names."""
    names = b"\0" + b"\0".join(name.encode() for name in (*sections, ".shstrtab")) + b"\0"
    where = [names.index(name.encode() + b"\0") for name in (*sections, ".shstrtab")]
    head = struct.pack("<4sBBB9xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 2, 190, 1, 0, 0, 64 + len(names), 0, 64, 0, 0, 64,
                       len(where), len(where) - 1)  # fmt: skip
    table = [struct.pack("<IIQQQQIIQQ", at, 3, 0, 0, 64, len(names), 0, 0, 1, 0) for at in where]
    return head + names + b"".join(table)


def test_the_kernels_of_a_cubin_are_counted_and_named(make_machine, in_process, tmp_path: Path) -> None:
    (tmp_path / "kernels.cubin").write_bytes(a_cubin(".nv.info", ".text.gemm", ".text.norm"))
    (tmp_path / "text.cubin").write_bytes(b"no kernels" * 100)
    rest = (c_void_p(0), c_void_p(0), c_uint(0), c_void_p(0), c_void_p(0), c_uint(0))

    def run(driver: Driver) -> list[object]:
        library, count, kernels = c_void_p(), c_uint(), (c_void_p * 2)()
        codes = [
            driver.call("cuLibraryLoadFromFile", byref(library), str(tmp_path / name).encode(), *rest)
            for name in ("nowhere.cubin", "text.cubin", "kernels.cubin")
        ]
        driver.check("cuLibraryGetKernelCount", byref(count), library)
        driver.check("cuLibraryEnumerateKernels", kernels, count, library)
        names = [ctypes.c_char_p() for _ in kernels]
        for name, kernel in zip(names, kernels, strict=True):
            driver.check("cuFuncGetName", byref(name), c_void_p(kernel))
        return [*codes, count.value, *(name.value for name in names)]

    assert in_process(run, make_machine()) == [301, 200, 0, 2, b"gemm", b"norm"]


def test_who_asks_for_the_drivers_private_tables_is_kept(make_machine, in_process) -> None:
    machine = make_machine()

    def run(driver: Driver) -> list[int]:
        return [driver.call("cuGetExportTable", byref(c_void_p()), c_void_p(0)) for _ in range(2)]

    assert in_process(run, machine) == [500, 500]
    assert [event.kind for event in read_events(machine)] == ["static_runtime"]


@on_card(returns=[900, 900, 901, 0])
def test_waiting_for_a_capturing_stream_spoils_the_capture(driver: Driver) -> list[int]:
    stream, graph = driver.pointer("cudaStreamCreate"), c_void_p()
    codes = [driver.call("cudaStreamBeginCapture", c_void_p(0), 0)]
    driver.check("cudaStreamBeginCapture", c_void_p(stream), 0)
    codes.append(driver.call("cudaStreamSynchronize", c_void_p(stream)))
    codes.append(driver.call("cudaStreamEndCapture", c_void_p(stream), byref(graph)))
    return [*codes, driver.call("cudaStreamSynchronize", c_void_p(stream))]


@on_card(returns=[0, 9, 9, 1])
def test_launches_are_counted_and_checked(driver: Driver) -> list[int]:
    before = driver.call("control_launches")
    codes = [driver.launch(threads=n) for n in (1024, 1025, 0)]
    return [*codes, driver.call("control_launches") - before]


def test_an_unknown_function_ends_the_run_with_its_name(make_machine, start_process, tmp_path) -> None:
    machine, errors = make_machine(), tmp_path / "stderr"

    def run(driver: Driver) -> None:
        driver.malloc(1)
        driver.call("generic_unknown", b"cusolverDnSgetrf_bufferSize", b"libcusolver.so.12")

    child = start_process(run, machine, TEST_STDERR=str(errors))
    assert child.wait() & 127 == 6, "abort"
    line = "vramprobe: libcusolver.so.12: cusolverDnSgetrf_bufferSize is not emulated: "
    assert errors.read_text().startswith(line)
    assert '"kind": "unknown_function", "name": "cusolverDnSgetrf_bufferSize"' in (machine / "events.jsonl").read_text()


@on_card(returns=[None, 1])
def test_entry_points_by_name(driver: Driver) -> list:
    def address(name: str) -> int:
        return ctypes.cast(getattr(driver.library, f"emu_{name}"), c_void_p).value

    def ask(name: bytes, version: int = 13000) -> tuple[int, int | None, int]:
        out, found = c_void_p(), c_int()
        code = driver.call("cuGetProcAddress_v2", name, byref(out), version, c_uint64(0), byref(found))
        return code, out.value, found.value

    assert ask(b"cuMemAlloc") == (0, address("cuMemAlloc_v2"), 0)
    assert ask(b"cuStreamGetCaptureInfo") == (0, address("cuStreamGetCaptureInfo_v3"), 0)
    assert ask(b"cuStreamGetCaptureInfo", 12000) == (0, address("cuStreamGetCaptureInfo_v2"), 0)
    assert ask(b"cuGetProcAddress", 11030) == (0, address("cuGetProcAddress"), 0)
    assert ask(b"cuNobodyKnows") == (500, None, 1)
    out, found = c_void_p(1), c_int()
    driver.check("cudaGetDriverEntryPoint", b"cuNobodyKnows", byref(out), c_uint64(0), byref(found))
    return [out.value, found.value]


def test_nvml_sees_every_card_and_charges_nothing(make_machine, in_process) -> None:
    machine = make_machine(num_devices=2, driver_version=13000)

    def run(driver: Driver) -> None:
        assert driver.call("nvmlDeviceGetCount_v2", byref(c_uint())) == 1, "not initialised"
        device, text = driver.nvml_device(1), ctypes.create_string_buffer(96)
        assert driver.number("nvmlDeviceGetCount_v2", kind=c_uint) == 2
        driver.check("nvmlDeviceGetUUID", c_void_p(device), text, 96)
        assert text.value.decode() == device_uuid(machine, 1)
        assert driver.call("nvmlDeviceGetUUID", c_void_p(device), text, 10) == 7
        by_uuid, by_bus = c_void_p(), c_void_p()
        driver.check("nvmlDeviceGetHandleByUUID", device_uuid(machine, 1).encode(), byref(by_uuid))
        driver.check("nvmlDeviceGetHandleByPciBusId_v2", b"00000000:02:00.0", byref(by_bus))
        assert by_uuid.value == by_bus.value == device
        assert driver.call("nvmlDeviceGetHandleByUUID", b"GPU-none", byref(by_uuid)) == 6
        assert driver.call("nvmlDeviceGetHandleByIndex_v2", 2, byref(by_uuid)) == 2
        words = (c_uint64 * 5)(5 * 8 | 2 << 24)
        driver.check("nvmlDeviceGetMemoryInfo_v2", c_void_p(device), words)
        assert [n // MIB for n in words[1:]] == [1124, 100, 1024, 0], "total, reserved, free, used"
        assert driver.call("nvmlDeviceGetMigMode", c_void_p(device), byref(c_uint()), byref(c_uint())) == 3
        driver.check("nvmlSystemGetDriverVersion", text, 96)
        assert text.value == b"580.65.06"
        assert driver.number("nvmlSystemGetCudaDriverVersion_v2") == 13000
        assert driver.call("nvmlErrorString", 3) == b"The requested operation is not available on target device"
        assert driver.nvml_processes(1) == {}

    in_process(run, machine, CUDA_VISIBLE_DEVICES="0")


def test_without_a_machine_there_is_no_device_and_one_line_says_so(in_process, tmp_path) -> None:
    errors = tmp_path / "stderr"

    def run(driver: Driver) -> list[int]:
        count = c_int(7)
        codes = [driver.call("cuInit", 0), driver.call("cudaGetDeviceCount", byref(count)), driver.call("nvmlInit_v2")]
        return [*codes, count.value]

    assert in_process(run, None, TEST_STDERR=str(errors))[:2] == [100, 100]
    first = errors.read_text().splitlines()[0]
    assert "VRAMPROBE_EMULATED_MACHINE is not set" in first


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format 1", "format 2", "line 1: format is 2: this driver reads format 1"),
        ("fill zeros", "fill noise", "fill is noise: zeros, ones, random and keep are allowed"),
        ("sm_count 108", "sm_count many", "sm_count is many: an integer from 1 to 4096 is allowed"),
        ("sm_count 108\n", "", "device 0 lacks sm_count"),
        ("sm_count 108", "colour blue", "unknown key colour of a device"),
        ("trace 0", "noise 0", "unknown key noise"),
        ("compute_capability 8.0", "compute_capability 8", "compute_capability is 8: major.minor"),
        ("uuid GPU-", "uuid X", "GPU- and 32 hexadecimal digits are allowed"),
        ("device 0", "device 1", "devices are numbered from 0"),
    ],
)
def test_a_machine_that_cannot_be_is_one_line(old, new, message, make_machine, in_process, tmp_path: Path) -> None:
    machine, errors = make_machine(), tmp_path / "stderr"
    path = machine / "machine.txt"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))

    def run(driver: Driver) -> int:
        with pytest.raises(CudaError) as failed:
            driver.malloc(1)
        assert driver.call("nvmlInit_v2") == 9, "no driver"
        return failed.value.code

    assert in_process(run, machine, TEST_STDERR=str(errors)) == 100
    line = errors.read_text().splitlines()[0]
    assert line.startswith(f"vramprobe: {path}, line ")
    assert message in line
