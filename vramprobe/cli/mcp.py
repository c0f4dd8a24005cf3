"""``vramprobe mcp``: the verbs that answer as tools of the Model Context Protocol, over stdin and stdout.

In: an agent's calls. Out: what the same command prints with ``--json``, its exit code and its notes. Each call is a
process of its own, so that nothing a verb prints or loads reaches the protocol. Loads the MCP SDK only when it serves.
"""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.main import get_command

import vramprobe
from vramprobe.cli.options import ANSWERED, EXIT_CODES, UNCERTAIN, print_json
from vramprobe.errors import VramprobeError, require_extra

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

_INSTRUCTIONS = (
    "How much GPU memory a fine-tuning run needs, and why. Bytes are integers. Exit code 0: fits, or no GPU was given; "
    "3: does not fit; 4: tight, or a part is not counted, so it may not fit. A prediction is not a measurement: say so."
)


def mcp(
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the tools as JSON instead of serving them.")
    ] = False,
) -> None:
    """Serve predict, explain, recommend, profile and techniques to an agent, by the Model Context Protocol on stdio."""
    require_extra("mcp", "an MCP server")
    server = make_server()
    if json_output:
        import asyncio

        listed = asyncio.run(server.list_tools())
        print_json([tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in listed])
    else:
        server.run("stdio")


def make_server() -> MCPServer:
    """Return the server with its five tools."""
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("vramprobe", version=vramprobe.__version__, instructions=_INSTRUCTIONS)
    for tool in (predict_tool, explain_tool, recommend_tool, profile_tool, techniques_tool):
        server.add_tool(_refusing(tool), name=tool.__name__.removesuffix("_tool"), structured_output=False)
    return server


def _refusing(tool: Callable[..., str]) -> Callable[..., str]:
    """Return ``tool`` with a verb's refusal as the SDK's own error, whose words reach the agent."""
    from mcp.server.mcpserver.exceptions import ToolError

    @functools.wraps(tool)
    def refusing(**words: Any) -> str:
        try:
            return tool(**words)
        except VramprobeError as error:
            raise ToolError(str(error)) from None

    return refusing


def predict_tool(
    model: str,
    method: str,
    batch_size: int,
    seq_len: int,
    gpu: str | None = None,
    options: dict[str, Any] | None = None,
) -> str:
    """Predict the peak memory of a fine-tuning run in a second, and whether it fits a GPU; no GPU is needed.

    model: a hub id or a slug; method: full, lora or qlora; gpu: a name such as RTX-4090, or a size such as 12GiB.
    options: more of `vramprobe predict --help` by name, such as {"gradient_checkpointing": true, "lora_r": 8};
    {"changes": true} adds what each other option would save.
    """
    words = {"model": model, "method": method, "batch_size": batch_size, "seq_len": seq_len, "gpu": gpu}
    return ask_verb("predict", words | (options or {}))


def explain_tool(log: str, options: dict[str, Any] | None = None) -> str:
    """Explain an out-of-memory error: what was full, in which phase, why, and what to try. log: the run's output."""
    return ask_verb("explain", options or {}, ["-"], given=log)


def recommend_tool(model: str, method: str, seq_len: int, tokens: str, options: dict[str, Any] | None = None) -> str:
    """Rank the GPUs to rent for a run, by dollars and hours. tokens: such as 50M; options: of `vramprobe recommend`."""
    words = {"model": model, "method": method, "seq_len": seq_len, "tokens": tokens}
    return ask_verb("recommend", words | (options or {}))


def profile_tool(command: list[str], gpu: str, options: dict[str, Any] | None = None) -> str:
    """Run an unmodified training command on an emulated GPU, and return where its memory goes; takes a minute or more.

    command: its words, such as ["python", "train.py"]. Weights, tokenizers and data that are missing are replaced by
    empty ones. Linux only, after `vramprobe emulate setup`.
    """
    return ask_verb("profile", {"emulate": gpu, "empty_weights": True} | (options or {}), ["--", *command])


def techniques_tool(kind: str | None = None, options: dict[str, Any] | None = None) -> str:
    """List what each memory-saving technique saved in an emulated run and costs in time.

    kind: such as optimizer; options with a model, method, batch_size, seq_len and gpu rank them for that run.
    """
    return ask_verb("techniques", {"kind": kind} | (options or {}))


def ask_verb(verb: str, options: Mapping[str, Any], words: Sequence[str] = (), given: str = "") -> str:
    """Return the answer of a verb as JSON: its exit code and verdict, its output, its notes.

    Raises VramprobeError, with the verb's own words, where it did not answer.
    """
    flags = [word for name, value in options.items() for word in argument_words(verb, name, value)]
    command = [sys.executable, "-m", "vramprobe", verb, *flags, "--json", *words]
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode not in ANSWERED:
        raise VramprobeError((done.stderr or done.stdout).strip() or f"{verb} ended with {done.returncode}")
    said = {code: verdict for verdict, code in EXIT_CODES.items()} | {UNCERTAIN: "may not fit"}
    found = {"exit_code": done.returncode, "answer": json.loads(done.stdout), "notes": done.stderr.splitlines()}
    has_verdict = verb == "predict" and options.get("gpu") is not None
    return json.dumps({"verdict": said[done.returncode]} | found if has_verdict else found)


def argument_words(verb: str, name: str, value: Any) -> list[str]:
    """Return an option as the verb's command line has it: true and false are switches, null is left out."""
    flag = f"--{name.lstrip('-').replace('_', '-')}"
    if value is None:
        return []
    if value is False:
        off = f"--no-{flag.removeprefix('--')}"
        return [off] if any(off in param.secondary_opts for param in _params_of(verb)) else []
    return [flag] if value is True else [f"{flag}={one}" for one in (value if isinstance(value, list) else [value])]


def _params_of(verb: str) -> list[Any]:
    alone = typer.Typer()
    alone.command()(getattr(importlib.import_module(f"vramprobe.cli.{verb}"), verb))
    return get_command(alone).params
