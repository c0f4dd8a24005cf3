"""Hold `vramprobe serve` against published logs of vLLM; learn the charges outside torch from half of them.

Needs nothing but this package; takes a second. Rows with an even number are learnt from, the others are held out:

    python benchmarks/rollouts/serving.py            # rebuilds serving.csv, serving.md and the shipped charges
    python benchmarks/rollouts/serving.py --check    # fails if one is stale
"""

import statistics
import sys
from pathlib import Path

from vramprobe.catalog import find_model
from vramprobe.catalog.shipped import data_file
from vramprobe.predict.serve import serve
from vramprobe.units import GIB

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from tables import as_csv, as_markdown, filled, read_csv, write_or_check  # noqa: E402

CHARGES = data_file("serving_charges.csv")
#: Published models → the catalog's; what is not here is no model of the catalog's, or has a part that is not text.
MODELS = {
    "google/gemma-2-27b-it": "gemma-2-27b", "google/gemma-2-2b-it": "gemma-2-2b", "google/gemma-2-9b-it": "gemma-2-9b",
    "google/gemma-7b": "gemma-7b", "ibm-granite/granite-3.1-2b-instruct": "granite-3.3-2b",
    "ibm-granite/granite-3.1-8b-instruct": "granite-3.3-8b", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b", "openai/gpt-oss-20b": "gpt-oss-20b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b", "Qwen/Qwen2.5-72B-Instruct": "qwen2.5-72b", "Qwen/Qwen3-8B": "qwen3-8b",
    "redhatai/Llama-3.3-70B-Instruct-quantized.w8a8": "llama-3.3-70b", "Qwen/Qwen3-14B": "qwen3-14b",
}  # fmt: skip
QUANTIZATIONS = {"None": "none", "none": "none", "": "none", "compressed-tensors": "w8a8"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16"}
RELEASES = ("0.17.0", "0.19.0")  # whose sampler the arithmetic knows
#: Rows of "the same command" as the others, which does not tell its batch: vllm serve's on an H100 is assumed, and no
#: charge is learnt from them.
ASSUMED = {"78"}
BATCHED_TOKENS, SEQS = 8192, 1024
BLOCK_TOKENS = 16
COLUMNS = ("row", "half", "model", "quantization", "GPUs", "max_model_len", "weights", "activation peak",
           "non-torch", "graphs", "KV cache", "KV tokens", "concurrency", "KV tokens error")  # fmt: skip


def published() -> list[dict[str, str]]:
    """Rows of releases and models that the arithmetic knows, on one pipeline stage, with all conditions told."""
    return [
        row
        for row in read_csv(HERE / "published_vllm.csv")
        if row["vllm_version"] in RELEASES
        and row["model"] in MODELS
        and row["pipeline_parallel"] == "1"
        and "H100" in row["gpu"]
        and (row["row"] in ASSUMED or (row["max_num_batched_tokens"] and row["kv_tokens"]))
    ]


def published_tokens(row: dict[str, str]) -> int:
    """As printed, or of the blocks, or of the requests at once, which are rounded to 0.01."""
    if row["kv_tokens"] or row["gpu_blocks"]:
        return int(row["kv_tokens"] or BLOCK_TOKENS * int(row["gpu_blocks"]))
    return round(float(row["max_concurrency"]) * int(row["concurrency_at_len"]))


def half(row: dict[str, str]) -> str:
    """Say whether charges are learnt from a row, or it is held out."""
    return "held out" if int(row["row"]) % 2 or row["row"] in ASSUMED else "learnt from"


def charges(rows: list[dict[str, str]]) -> str:
    """serving_charges.csv: the median of what the driver took, and a line through the graphs' memory by layers."""
    learnt = [row for row in rows if half(row) == "learnt from"]
    names, found = ("charge", "gpu", "tensor_parallel", "mib", "mib_per_layer", "num_rows", "source"), []
    source = "median of the even rows of benchmarks/rollouts/published_vllm.csv"
    for ranks in ("1", "2"):
        said = [float(row["non_torch_gib"]) for row in learnt if row["tensor_parallel"] == ranks]
        found.append(("non_torch", "H100-SXM", ranks, round(statistics.median(said) * 1024), "", len(said), source))
    alone = [row for row in learnt if row["tensor_parallel"] == "1" and row["graph_gib"]]
    layers = [find_model(MODELS[row["model"]]).config["num_hidden_layers"] for row in alone]
    line = statistics.linear_regression(layers, [float(row["graph_gib"]) * 1024 for row in alone])
    source = "least squares on the same rows with one GPU: 51 piecewise and 51 full graphs"
    found.append(("graphs", "H100-SXM", "1", round(line.intercept), round(line.slope, 2), len(alone), source))
    return as_csv(dict(zip(names, row, strict=True)) for row in found)


def compared(row: dict[str, str]) -> list[str]:
    """One line of the table: published / predicted."""
    quantization = QUANTIZATIONS.get(row["quantization"], row["quantization"])
    found = serve(
        model=MODELS[row["model"]],
        gpu="H100-SXM",
        max_model_len=int(row["max_model_len"]),
        max_num_batched_tokens=int(row["max_num_batched_tokens"] or BATCHED_TOKENS),
        max_num_seqs=int(row["max_num_seqs"] or SEQS),
        gpu_memory_utilization=float(row["gpu_memory_utilization"]),
        tensor_parallel_size=int(row["tensor_parallel"]),
        dtype=DTYPES[row["dtype"]],
        quantization=quantization,
        kv_cache_dtype=row["kv_cache_dtype"],
    )
    tokens = published_tokens(row)
    return [
        row["row"],
        half(row),
        row["model"].partition("/")[2] + ("" if row["dtype"] != "float32" else " (float32)"),
        quantization + (", fp8 KV" if row["kv_cache_dtype"] == "fp8" else ""),
        row["tensor_parallel"],
        row["max_model_len"],
        f"{row['weights_gib']} / {found.weights_bytes / GIB:.2f}",
        f"{row['activation_peak_gib']} / {found.activation_bytes / GIB:.2f}",
        f"{row['non_torch_gib']} / {found.non_torch_bytes / GIB:.2f}",
        f"{row['graph_gib']} / " + ("not known" if found.graph_bytes is None else f"{found.graph_bytes / GIB:.2f}"),
        f"{row['kv_gib']} / {found.kv_cache_bytes / GIB:.2f}",
        f"{tokens:,} / {found.kv_cache_tokens:,}",
        f"{row['max_concurrency']} / {found.max_concurrency:.2f}",
        f"{100 * (found.kv_cache_tokens / tokens - 1):+.2f} %",
    ]


def _error(line: list[str]) -> float:
    return abs(float(line[-1].removesuffix(" %")))


def page(lines: list[list[str]]) -> str:
    """serving.md: the result, then the table."""
    held = [line for line in lines if line[1] == "held out"]
    summary = [
        f"{name}: {len(some)} rows, median {statistics.median(map(_error, some)):.2f} %, "
        f"worst {max(map(_error, some)):.2f} % (row {max(some, key=_error)[0]})"
        for name, some in (
            ("held out", held),
            ("held out, one GPU", [line for line in held if line[4] == "1"]),
            ("all", lines),
        )
    ]
    table = as_markdown(COLUMNS, "l" * len(COLUMNS), lines)
    return filled(HERE / "serving.md", summary=[f"- {one}" for one in summary], table=table)


def main() -> None:
    """Write the files, or say which are stale. The charges come first: what is predicted reads them."""
    rows, is_check = published(), "--check" in sys.argv[1:]
    made: dict[Path, str | bytes] = {CHARGES: charges(rows)}
    if not is_check:
        write_or_check(made, "rollouts/serving.py", check=False)
    lines = sorted((compared(row) for row in rows), key=lambda line: int(line[0]))
    made[HERE / "serving.csv"] = as_csv(dict(zip(COLUMNS, line, strict=True)) for line in lines)
    made[HERE / "serving.md"] = page(lines)
    write_or_check(made, "rollouts/serving.py", check=is_check)


if __name__ == "__main__":
    main()
