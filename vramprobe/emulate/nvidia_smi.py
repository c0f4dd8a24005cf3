"""``nvidia-smi`` on the emulated machine: the table, ``-L`` and the CSV queries, answered by the emulated NVML.

In: the command line of nvidia-smi, in a process that sees the machine. Out: what a real one prints of such cards, on
stdout; an option or a field that is not answered is one line and exit status 2. Run as a file by whatever Python the
command has: the standard library alone. It shows every card, whatever CUDA_VISIBLE_DEVICES says, as a real one does.
"""

import csv
import ctypes
import os
import sys
import time

NOT_AVAILABLE = "[N/A]"
_MIB = 1 << 20
_ANSWERED = (
    "without options, -L, -i ID, -l SECONDS, -lms MILLISECONDS, --query-gpu=FIELDS or --query-compute-apps=FIELDS with "
    "--format=csv[,noheader][,nounits]"
)
with open(
    os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data", "nvidia_smi_fields.csv"), encoding="utf-8"
) as _file:
    _ROWS = list(csv.DictReader(_file))
#: A field → its key in a card, its unit; and, of --query-compute-apps, in a process on a card.
FIELDS, APP_FIELDS = (
    {row["field"]: (row["key"], row["unit"]) for row in _ROWS if row["query"] == query}
    for query in ("gpu", "compute-apps")
)
#: Other names of the same field in nvidia-smi's own help.
OTHER_NAMES = {name: row["field"] for row in _ROWS for name in row["other_names"].split()}


class UnknownQuery(Exception):
    """Error of a query that is not answered, in one line."""


class Nvml:
    """The emulated NVML, as far as nvidia-smi asks it."""

    def __init__(self, library=None):
        try:
            self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise UnknownQuery(f"no emulated NVML is to be had: {error}") from None
        if self._library.nvmlInit_v2():
            raise UnknownQuery("the emulated driver did not start")

    def number(self, name, *words, kind=ctypes.c_uint):
        """One number by reference; None where it is not supported."""
        value = kind()
        return None if getattr(self._library, name)(*words, ctypes.byref(value)) else value.value

    def text(self, name, *words):
        room = ctypes.create_string_buffer(256)
        return None if getattr(self._library, name)(*words, room, 256) else room.value.decode()

    def cards(self):
        """Every card as a dict of what the fields show."""
        count = self.number("nvmlDeviceGetCount_v2")
        return [self._card(index, count) for index in range(count)]

    def versions(self):
        """Versions of NVML, of the driver, and of the newest CUDA that it serves."""
        cuda = self.number("nvmlSystemGetCudaDriverVersion_v2", kind=ctypes.c_int)
        texts = (self.text("nvmlSystemGetNVMLVersion"), self.text("nvmlSystemGetDriverVersion"))
        return (*texts, f"{cuda // 1000}.{cuda % 1000 // 10}")

    def _card(self, index, count):
        device = ctypes.c_void_p(self.number("nvmlDeviceGetHandleByIndex_v2", index, kind=ctypes.c_void_p))
        numbers = (ctypes.c_uint64 * 5)(40 | 2 << 24)  # nvmlMemory_v2_t: version, total, reserved, free, used
        has_memory = self._library.nvmlDeviceGetMemoryInfo_v2(device, numbers) == 0
        total, reserved, free, used = (number // _MIB if has_memory else None for number in numbers[1:])
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
        ecc, pending = ctypes.c_uint(), ctypes.c_uint()
        self._library.nvmlDeviceGetEccMode(device, ctypes.byref(ecc), ctypes.byref(pending))
        milliwatts = self.number("nvmlDeviceGetPowerManagementLimit", device)
        pci = ctypes.create_string_buffer(68)  # nvmlPciInfo_t: the bus id stands in its last 32 bytes
        self._library.nvmlDeviceGetPciInfo_v3(device, pci)
        return {
            "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000"),
            "count": count,
            "index": index,
            "name": self.text("nvmlDeviceGetName", device),
            "uuid": self.text("nvmlDeviceGetUUID", device),
            "bus_id": pci.raw[36:].split(b"\0")[0].decode(),
            "driver_version": self.text("nvmlSystemGetDriverVersion"),
            "compute_cap": f"{major.value}.{minor.value}",
            "persistence_mode": "Enabled",
            "compute_mode": "Default",
            "ecc_mode": "Enabled" if ecc.value else "Disabled",
            "pstate": f"P{self.number('nvmlDeviceGetPerformanceState', device)}",
            "total_mib": total,
            "reserved_mib": reserved,
            "free_mib": free,
            "used_mib": used,
            "utilization": 0,
            "celsius": self.number("nvmlDeviceGetTemperature", device, 0),
            "watts": "0.00",
            "watts_limit": f"{milliwatts / 1000:.2f}" if milliwatts else None,
            "sm_mhz": self.number("nvmlDeviceGetClockInfo", device, 1),
            "memory_mhz": self.number("nvmlDeviceGetClockInfo", device, 2),
            "apps": self._apps(device),
        }

    def _apps(self, device):
        room = ctypes.c_uint(512)
        words = (ctypes.c_uint64 * (3 * 512))()  # nvmlProcessInfo_t: pid, bytes, two instances of 32 bits
        if self._library.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(room), words):
            return []
        pids = [(words[3 * at] & 0xFFFFFFFF, words[3 * at + 1] // _MIB) for at in range(room.value)]
        return [
            {"pid": pid, "process": self.text("nvmlSystemGetProcessName", pid), "used_mib": used} for pid, used in pids
        ]


def answered(words, cards, versions):
    """Return the text of one answer. ``versions``: of NVML, the driver and CUDA. Raises UnknownQuery."""
    asked = parsed(words)
    chosen = [card for card in cards if not asked["ids"] or {str(card["index"]), card["uuid"]} & set(asked["ids"])]
    if missing := [one for one in asked["ids"] if not any(one in (str(card["index"]), card["uuid"]) for card in cards)]:
        raise UnknownQuery(f"no GPU {missing[0]}: this machine has {', '.join(str(card['index']) for card in cards)}")
    if asked["what"] == "list":
        return "\n".join(f"GPU {card['index']}: {card['name']} (UUID: {card['uuid']})" for card in chosen)
    if asked["what"] == "gpu":
        return csv_lines(asked, {**FIELDS, **{other: FIELDS[name] for other, name in OTHER_NAMES.items()}}, chosen)
    if asked["what"] == "compute-apps":
        of_card = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "bus_id"}
        apps = [
            {**app, **{key: card[name] for key, name in of_card.items()}} for card in chosen for app in card["apps"]
        ]
        return csv_lines(asked, APP_FIELDS, apps)
    return table(chosen, versions)


def parsed(words):
    """The command line → what is asked. Raises UnknownQuery for an option that is not answered."""
    asked = {"what": "table", "ids": [], "fields": [], "format": [], "seconds": None}
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]
    while words:
        word = words.pop(0)
        if word in ("-L", "--list-gpus"):
            asked["what"] = "list"
        elif word in ("-i", "--id"):
            asked["ids"] = _value(word, words).split(",")
        elif word in ("-l", "--loop"):
            asked["seconds"] = float(_value(word, words))
        elif word in ("-lms", "--loop-ms"):
            asked["seconds"] = float(_value(word, words)) / 1000
        elif word in ("--query-gpu", "--query-compute-apps"):
            asked["what"] = word.removeprefix("--query-")
            asked["fields"] = [field.strip() for field in _value(word, words).split(",")]
        elif word == "--format":
            asked["format"] = [part.strip() for part in _value(word, words).split(",")]
        else:
            raise UnknownQuery(f"{word!r} is not answered on an emulated machine. It answers: {_ANSWERED}")
    if asked["fields"] and (asked["format"][:1] != ["csv"] or set(asked["format"]) - {"csv", "noheader", "nounits"}):
        raise UnknownQuery(f"--query-{asked['what']} needs --format=csv[,noheader][,nounits]")
    return asked


def _value(word, words):
    if not words:
        raise UnknownQuery(f"{word} needs a value. It answers: {_ANSWERED}")
    return words.pop(0)


def csv_lines(asked, known, rows):
    """Header and rows, as the format says. Raises UnknownQuery for an unknown field."""
    for field in asked["fields"]:
        if field not in known:
            raise UnknownQuery(
                f'Field "{field}" is not a valid field to query on an emulated machine. It answers: {", ".join(known)}'
            )
    columns = [(OTHER_NAMES.get(field, field), *known[field]) for field in asked["fields"]]
    lines = []
    if "noheader" not in asked["format"]:
        lines.append(", ".join(f"{name} [{unit}]" if unit else name for name, _, unit in columns))
    for row in rows:
        cells = ((row.get(key), "" if "nounits" in asked["format"] else unit) for _, key, unit in columns)
        lines.append(", ".join(NOT_AVAILABLE if cell is None else f"{cell} {unit}".rstrip() for cell, unit in cells))
    return "\n".join(lines)


def table(cards, versions):
    """The overview that nvidia-smi prints without options, in its own columns."""
    nvml, driver, cuda = versions
    line, empty = "-" * 89, "|" + " " * 41 + "|" + " " * 24 + "|"
    rows = [
        time.strftime("%a %b %e %H:%M:%S %Y"),
        f"+{line}+",
        f"| NVIDIA-SMI {nvml:<22} Driver Version: {driver:<14} CUDA Version: {cuda:<8} |",
        "|-----------------------------------------+------------------------+----------------------+",
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        f"{empty}               MIG M. |",
        "|=========================================+========================+======================|",
    ]
    for card in cards:
        name = card["name"] if len(card["name"]) <= 25 else card["name"][:22] + "..."
        limit = f"{float(card['watts_limit']):.0f}W" if card["watts_limit"] else "N/A"
        known = card["total_mib"] is not None
        memory = f"{card['used_mib']:>6}MiB / {card['total_mib']:>6}MiB" if known else "Not Supported"
        ecc = "0" if card["ecc_mode"] == "Enabled" else "Off"
        rows += [
            f"| {card['index']:>3}  {name:<25}       On | {card['bus_id']:>18} Off | {ecc:>20} |",
            f"| N/A  {card['celsius']:>3}C    {card['pstate']:<4} {'0W / ' + limit:>21} | {memory:>22} "
            f"| {'0%':>7}      Default |",
            f"{empty}                  N/A |",
            "+-----------------------------------------+------------------------+----------------------+",
        ]
    rows += [
        "",
        f"+{line}+",
        f"| {'Processes:':<87} |",
        f"| {' GPU   GI   CI              PID   Type   Process name':<75}  GPU Memory |",
        f"| {'       ID   ID':<75}  Usage      |",
        f"|{'=' * 89}|",
    ]
    apps = [(card["index"], app) for card in cards for app in card["apps"]]
    for index, app in apps:
        process = (app["process"] or "")[-34:]
        about = f"{index:>4}   N/A  N/A {app['pid']:>16}      C   {process}"
        rows.append(f"| {about:<75} {app['used_mib']:>7}MiB |")
    if not apps:
        rows.append(f"| {' No running processes found':<87} |")
    return "\n".join([*rows, f"+{line}+"])


def main(words):
    """-> the exit status."""
    try:
        asked, nvml = parsed(words), Nvml()
        while True:
            sys.stdout.write(answered(words, nvml.cards(), nvml.versions()) + "\n")
            sys.stdout.flush()
            if asked["seconds"] is None:
                return 0
            time.sleep(asked["seconds"])
    except (UnknownQuery, ValueError) as error:
        sys.stderr.write(f"nvidia-smi: {error}\n")
        return 2
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
