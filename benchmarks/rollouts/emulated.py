"""Run vLLM on an emulated GPU for rows of published_vllm.csv, and hold its own account against theirs.

emulated.toml has the rows. Needs `vramprobe emulate` (a C compiler) and an interpreter with the release of vLLM that
they name and no package of NVIDIA's (emulated.md tells how); two to four minutes a row on two cores:

    python benchmarks/rollouts/emulated.py --row 98 --python PATH    # one row
    python benchmarks/rollouts/emulated.py --python PATH    # the rows of PATH's release that emulated.jsonl lacks
    python benchmarks/rollouts/emulated.py                  # the page alone
    python benchmarks/rollouts/emulated.py --check          # fails if it is stale
"""

import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vramprobe.records.engine import EngineMemory
from vramprobe.records.profile import ProfileRecord

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
import journal  # noqa: E402
import serving  # noqa: E402
from tables import as_markdown, filled, read_csv, write_or_check  # noqa: E402

JOURNAL, PAGE = HERE / "emulated.jsonl", HERE / "emulated.md"
_SERVED, _GPU = "0.19.0", "H100-SXM"
#: Column → the field of the engine's account, and the column of published_vllm.csv.
FIELDS = {
    "weights": ("weights_gib", "weights_gib"),
    "activation peak": ("activation_peak_gib", "activation_peak_gib"),
    "non-torch": ("non_torch_gib", "non_torch_gib"),
    "graphs": ("graph_gib", "graph_gib"),
    "KV cache": ("kv_cache_gib", "kv_gib"),
}
HEAD = ("row", "vLLM", "GPU", "model", "settings", *FIELDS, "KV tokens", "error", "corrected")


@dataclass(frozen=True)
class Row:
    """Settings that repeat a published log: a release on a GPU, and the arguments of LLM()."""

    number: int
    vllm: str
    gpu: str
    settings: dict[str, Any]
    told: dict[str, Any]  # the settings and environment variables that its entry names
    environment: dict[str, str]
    worker: int | None = None  # whose figures the log has, of several that differ

    @property
    def is_served(self) -> bool:
        """Tell whether the log is of vllm serve 0.19.0 on H100s, whose logs have their settings in common."""
        return self.vllm == _SERVED

    def matches(self, record: ProfileRecord) -> bool:
        """Tell whether a profile is of this row: its release, its GPU, its arguments."""
        return (
            record.engine is not None
            and record.emulation is not None
            and (record.engine.version, record.emulation.card) == (self.vllm, self.gpu.partition(" ")[0])
            and json.loads(record.command[-1]) == self.settings
        )


def rows() -> dict[int, Row]:
    """emulated.toml, by the row of published_vllm.csv."""
    table = tomllib.loads((HERE / "emulated.toml").read_text(encoding="utf-8"))
    found = {}
    for number, entry in table["rows"].items():
        release, gpu = entry.pop("vllm", _SERVED), entry.pop("gpu", _GPU)
        worker, environment = entry.pop("worker", None), entry.pop("environment", {})
        model = {"model": entry.pop("model")}
        settings = {**model, **(table["serve"] if release == _SERVED else {}), **entry}
        found[int(number)] = Row(int(number), release, gpu, settings, entry | environment, environment, worker)
    return found


def ran(table: dict[int, Row]) -> dict[int, EngineMemory]:
    """The account of the last profile of each row that came to a cache, in order."""
    found = journal.latest_profiles(
        JOURNAL, lambda record: [row.number for row in table.values() if row.matches(record) and _tokens(record.engine)]
    )
    return {number: _account(found[number], table[number].worker) for number in sorted(found)}


def _account(record: ProfileRecord, worker: int | None) -> EngineMemory:
    """The engine's, or one worker's with the tokens that the engine has, which its smallest cache decides."""
    assert record.engine is not None
    if worker is None:
        return record.engine
    (own,) = (rank.engine for rank in record.ranks if rank.engine is not None and rank.engine.worker == worker)
    return own.model_copy(update={"kv_cache_tokens": record.engine.kv_cache_tokens, "version": record.engine.version})


def profiled(
    python: str, gpu: str, settings: dict[str, Any], journal: Path, environment: dict[str, str] | None = None
) -> None:
    """Profile LLM() with these arguments as a first start: torch.compile finds no caches, and what it tries takes
    memory too."""
    words = ["--whole", "--trace", "none", "--emulate", gpu, "--empty-weights", "--save", str(journal)]
    script = [python, str(HERE / "llm.py"), json.dumps(settings)]
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", **(environment or {})}
    with TemporaryDirectory() as caches:
        variables |= {"VLLM_CACHE_ROOT": f"{caches}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
        subprocess.run(
            [sys.executable, "-m", "vramprobe", "profile", *words, "--", *script], env={**os.environ, **variables}
        )


def _tokens(account: EngineMemory) -> int:
    return account.kv_cache_tokens or serving.BLOCK_TOKENS * (account.kv_cache_blocks or 0)


def _error(told: dict[str, str], account: EngineMemory) -> float:
    return _tokens(account) / serving.published_tokens(told) - 1


def _corrected(told: dict[str, str], account: EngineMemory) -> float | None:
    """The error once the published GPU's memory and what it had outside torch are this one's; None if not told."""
    if not told["non_torch_gib"] or not account.kv_cache_gib:
        return None
    less = float(told["non_torch_gib"]) - (account.non_torch_gib or 0)
    if told["usable_gib"] and account.requested_gib:
        less += account.requested_gib - float(told["usable_gib"])
    rest = 1 - less / account.kv_cache_gib
    return rest * _tokens(account) / serving.published_tokens(told) - 1


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.2f} %"


def _both(published: str, emulated: float | None) -> str:
    """Published / emulated in GiB; "?" for what one of them does not tell."""
    told = f"{float(published):.2f}" if published else "?"
    return f"{told} / " + ("?" if emulated is None else f"{emulated:.2f}")


def line(row: Row, told: dict[str, str], account: EngineMemory) -> list[str]:
    """One line of a table: published / emulated."""
    told = {**told, "weights_gib": told["weights_gib"] or told["load_gib"]}
    values = [_both(told[column], getattr(account, field)) for field, column in FIELDS.values()]
    settings = [
        f"`{name}` {value if isinstance(value, str) else json.dumps(value)}" for name, value in row.told.items()
    ]
    settings += [f"worker {row.worker}"] if row.worker is not None else []
    return [
        str(row.number), row.vllm, row.gpu, row.settings["model"].partition("/")[2], ", ".join(settings), *values,
        f"{serving.published_tokens(told):,} / {_tokens(account):,}", _percent(_error(told, account)),
        _percent(_corrected(told, account)),
    ]  # fmt: skip


def summary(accounts: dict[int, EngineMemory], published: dict[int, dict[str, str]]) -> str:
    """Say how many rows there are, how far off, and how many logs are repeated here or by arithmetic."""
    weights = [
        abs(account.weights_gib - float(published[number]["weights_gib"] or published[number]["load_gib"]))
        for number, account in accounts.items()
        if account.weights_gib is not None
    ]
    errors = {
        number: abs(error)
        for number, account in accounts.items()
        if (error := _corrected(published[number], account)) is not None
    }
    worst = max(errors, key=errors.__getitem__)
    both = accounts.keys() | {int(row["row"]) for row in serving.published()}
    return "\n".join([
        f"- {len(accounts)} published logs are repeated here, {len(both)} with those of [arithmetic](serving.md)",
        f"- weights: within 0.05 GiB in {sum(gib <= 0.05 for gib in weights)} of {len(weights)} rows",
        "- tokens of KV cache, once the published GPU's memory and what it had outside torch are put in: "
        f"{100 * statistics.median(errors.values()):.2f} % off in the median of {len(errors)} rows, "
        f"{100 * errors[worst]:.2f} % at most (row {worst})",
    ])  # fmt: skip


def page() -> str:
    """emulated.md: the result, then a table of vLLM 0.19.0 on H100s and one of the other releases and GPUs."""
    published = {int(row["row"]): row for row in read_csv(HERE / "published_vllm.csv")}
    table = rows()
    accounts = ran(table)

    def lines(belongs: Callable[[Row], bool]) -> str:
        shown = [
            line(table[number], published[number], account)
            for number, account in accounts.items()
            if belongs(table[number])
        ]
        return "\n".join(as_markdown(HEAD, "rlll" + "l" + "r" * (len(HEAD) - 5), shown))

    return filled(
        PAGE,
        summary=summary(accounts, published),
        table=lines(lambda row: row.is_served),
        older=lines(lambda row: not row.is_served),
    )


def _asked(python: str, table: dict[int, Row]) -> list[Row]:
    """The row that is named, or those of the interpreter's release that did not run."""
    if "--row" in sys.argv:
        return [table[int(sys.argv[sys.argv.index("--row") + 1])]]
    release = subprocess.run(
        [python, "-c", "from importlib.metadata import version; print(version('vllm'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    return [table[number] for number in table.keys() - ran(table).keys() if table[number].vllm == release]


def main() -> None:
    """Run what is asked for if an interpreter is given; write the page, or say that it is stale."""
    if "--python" in sys.argv:
        python = sys.argv[sys.argv.index("--python") + 1]
        for row in _asked(python, rows()):
            profiled(python, row.gpu, row.settings, JOURNAL, row.environment)
    write_or_check({PAGE: page()}, "rollouts/emulated.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()
