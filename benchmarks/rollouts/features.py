"""Run what users switch on in vLLM on an emulated GPU: what each takes, or the line that says why it ends.

features.toml has the rows. Needs `vramprobe emulate` (a C compiler) and an interpreter with the vLLM that it names and
no package of NVIDIA's; one to four minutes a row on two cores:

    python benchmarks/rollouts/features.py --python PATH    # the rows that features.jsonl lacks, then the page
    python benchmarks/rollouts/features.py                  # the page alone
    python benchmarks/rollouts/features.py --check          # fails if it is stale
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from vramprobe.predict.serve import serve
from vramprobe.records.profile import ProfileRecord
from vramprobe.units import GIB

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import emulated  # noqa: E402
import journal  # noqa: E402
from tables import as_table, filled, write_or_check  # noqa: E402

JOURNAL, PAGE = HERE / "features.jsonl", HERE / "features.md"
_OURS = ("predicted", "environment")  # what an entry has beside arguments
TABLE = tomllib.loads((HERE / "features.toml").read_text(encoding="utf-8"))


def settings(name: str) -> dict[str, Any]:
    """The arguments of LLM()."""
    return {**TABLE["common"], **{key: one for key, one in TABLE["features"][name].items() if key not in _OURS}}


def ran() -> dict[str, ProfileRecord]:
    """The last profile of each feature, in the table's order."""
    found = journal.latest_profiles(
        JOURNAL, lambda record: [name for name in TABLE["features"] if settings(name) == json.loads(record.command[-1])]
    )
    return {name: found[name] for name in TABLE["features"] if name in found}


def predicted_gib(name: str) -> str:
    """The weights by arithmetic, or nothing."""
    if "predicted" not in TABLE["features"][name]:
        return ""
    model, quantization = TABLE["features"][name]["predicted"]
    asked = settings(name)
    found = serve(
        model=model, gpu=TABLE["gpu"], max_model_len=asked["max_model_len"], quantization=quantization,
        kv_cache_dtype=asked.get("kv_cache_dtype", "auto"), enforce_eager=True, vllm_release="0.32",
    )  # fmt: skip
    return f"{found.weights_bytes / GIB:.2f}"


def line(name: str, record: ProfileRecord) -> dict[str, str]:
    """One line of the table."""
    account, plain, asked = record.engine, {"model", *TABLE["common"]}, settings(name)
    words = [f"`{key}` {json.dumps(value)}" for key, value in asked.items() if key not in plain]
    words += [f"`{key}={value}`" for key, value in TABLE["features"][name].get("environment", {}).items()]
    ended = account is not None and account.kv_cache_tokens is not None
    return {
        "feature": name,
        "model": asked["model"].partition("/")[2],
        "arguments": ", ".join(words),
        "weights": f"{account.weights_gib:.2f}" if ended else "",
        "predicted": predicted_gib(name),
        "activation peak": f"{account.activation_peak_gib:.2f}" if ended else "",
        "KV cache": f"{account.kv_cache_gib:.2f}" if ended else "",
        "KV tokens": f"{account.kv_cache_tokens:,}" if ended else "",
        "ends": "answers" if record.outcome.kind == "ok" else record.warnings[0].partition(":")[0],
    }


def page() -> str:
    """features.md."""
    found = ran()
    lines = [line(name, record) for name, record in found.items()]
    answered = sum(record.outcome.kind == "ok" for record in found.values())
    summary = f"{answered} of {len(lines)} answer; the table says why each other one ends."
    return filled(PAGE, vllm=TABLE["vllm"], summary=summary, table=as_table(lines, "lllrrrrrl"))


def main() -> None:
    """Run what is missing if an interpreter is given; write the page, or say that it is stale."""
    if "--python" in sys.argv:
        python = sys.argv[sys.argv.index("--python") + 1]
        for name in TABLE["features"].keys() - ran().keys():
            environment = TABLE["features"][name].get("environment")
            emulated.profiled(python, TABLE["gpu"], settings(name), JOURNAL, environment)
    write_or_check({PAGE: page()}, "rollouts/features.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
