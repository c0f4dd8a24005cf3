"""``vramprobe serve``: an inference engine alone on a GPU.

In: vLLM's options. Out: where the GPU's memory goes and what the KV cache holds, as text or JSON.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramprobe.cli.options import CELL_OPTIONS, ExitZero, Gpu, Json, exit_with, show, takes_given
from vramprobe.units import format_bytes, requests_at_once

if TYPE_CHECKING:
    from vramprobe.predict.serve import Served

#: Option → (type, help): vLLM's own names, which ``vllm serve`` takes; the defaults are in predict/serve.py.
SERVE_OPTIONS: dict[str, tuple[Any, str]] = {
    "max_model_len": (int, "Longest request in tokens (default: the model's positions)."),
    "max_num_batched_tokens": (int, "Tokens per engine step (default 8192 from 70 GiB on but for A100s, else 2048)."),
    "max_num_seqs": (int, "Requests per engine step (default 1024 from 70 GiB on but for A100s, else 256)."),
    "gpu_memory_utilization": (float, "Share of the GPU that the engine takes (default 0.9; vLLM 0.32: 0.92)."),
    "tensor_parallel_size": (int, "GPUs that divide each layer (default 1)."),
    "quantization": (
        str,
        "none | fp8 | w8a8 | awq | gptq | bitsandbytes | mxfp4 (default: the checkpoint's own, or none).",
    ),
    "kv_cache_dtype": (str, "auto | fp8 (default auto: the model's dtype)."),
    "enforce_eager": (bool, "No CUDA graphs."),
    "vllm_release": (str, "0.19 | 0.32: whose formulas (default 0.19, of published logs)."),
}


@functools.partial(takes_given, mapping="serving", options=SERVE_OPTIONS)
def serve(
    serving: dict[str, Any],
    model: Annotated[str, typer.Option(help=CELL_OPTIONS["model"][1])],
    gpu: Gpu,
    dtype: Annotated[str | None, typer.Option(help=CELL_OPTIONS["dtype"][1])] = None,
    exit_zero: ExitZero = False,
    json_output: Json = False,
) -> None:
    """Predict an inference engine (vLLM) on a GPU: where its memory goes, and what its KV cache holds."""
    from vramprobe import api

    words: dict[str, Any] = serving if dtype is None else {"dtype": dtype, **serving}
    found = api.serve(model=model, gpu=gpu, **words)
    show(found, _print, as_json=json_output)
    exit_with(found.verdict, exit_zero=exit_zero)


def _print(found: Served) -> None:
    several = f" ×{found.tensor_parallel_size}, each" if found.tensor_parallel_size > 1 else ""
    print(f"{found.model} on {found.gpu}{several}, {found.engine}: predicted, not measured")
    print(
        f"max_model_len {found.max_model_len:,}, max_num_batched_tokens {found.max_num_batched_tokens:,}, max_num_seqs "
        f"{found.max_num_seqs:,}, gpu_memory_utilization {found.gpu_memory_utilization:g}, quantization "
        f"{found.quantization}\n"
    )
    from vramprobe.predict.serve import PADDING

    at_least, at_most = (" at least", " at most") if found.left_out else ("", "")
    for what, num_bytes, bound in (
        ("requested", found.requested_bytes, ""),
        ("weights", found.weights_bytes, at_least if any(one.startswith(PADDING) for one in found.left_out) else ""),
        *([("buffers", found.buffer_bytes, "")] if found.buffer_bytes else []),
        ("activation peak", found.activation_bytes, at_least),
        ("non-torch", found.non_torch_bytes, ""),
        ("KV cache", max(found.kv_cache_bytes, 0), at_most),
    ):
        print(f"  {what:<16} {format_bytes(num_bytes):>12} {bound}".rstrip())
    if found.graph_bytes:
        place = "taken off the KV cache" if found.buffer_bytes else "outside the requested memory"
        print(f"  {'CUDA graphs':<16} {format_bytes(found.graph_bytes):>12}  {place}")
    print(f"\nKV cache:{at_most} {found.kv_cache_tokens:,} tokens, {found.kv_cache_blocks:,} blocks")
    if found.verdict != "does not fit":
        print(
            f"{at_most.lstrip()} {requests_at_once(found.max_concurrency, found.max_model_len)} at once: ".lstrip(),
            end="",
        )
        print(found.verdict)
    else:
        print(f"no request of {found.max_model_len:,} tokens fits, and vLLM refuses to start: does not fit")
    if found.longest_request_tokens:
        print(
            f"longest request that {'may fit' if found.left_out else 'fits'}: {found.longest_request_tokens:,} tokens"
        )
    if found.left_out:
        print(f"not counted: {'; '.join(found.left_out)}")
    for note in found.notes:
        print(f"note: {note}")
