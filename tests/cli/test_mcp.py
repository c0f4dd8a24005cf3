"""Interfaces for agents: SKILL.md, whose every command answers, and the tools of ``vramprobe mcp``."""

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import HERE, OUT_OF_MEMORY, flags, vramprobe
from grids import grid

import vramprobe as package
from vramprobe.cli import mcp as served
from vramprobe.cli.options import ANSWERED, EXIT_CODES, UNCERTAIN
from vramprobe.errors import VramprobeError

SKILL = (Path(package.__file__).parent / "data" / "SKILL.md").read_text()
COMMANDS = re.findall(r"^vramprobe (.*)$", SKILL, re.MULTILINE)
CELL = {"model": "llama-3.1-8b", "method": "qlora", "batch_size": 1, "seq_len": 2048}
TOOLS = {"predict", "explain", "recommend", "profile", "techniques"}


# Ranks, and cells on a T4, are recorded, for a minute where the cache has none: tests/predict has them.
@pytest.mark.parametrize("command", grid(COMMANDS, *(one for one in COMMANDS if not re.search("--min-gpus|T4", one))))
def test_every_command_of_the_skill_answers(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(OUT_OF_MEMORY)
    done = vramprobe(*shlex.split(command), cwd=tmp_path)
    assert done.returncode in ANSWERED, done.stderr
    assert done.stdout
    assert done.returncode == 0 or "--exit-zero" not in command


def test_the_skill_names_the_exit_codes_and_the_package_prints_it() -> None:
    assert len(COMMANDS) >= 9
    codes = dict(re.findall(r"^\| (\d) \| (.+?) ", SKILL, re.MULTILINE))
    assert {str(EXIT_CODES["fits"]), str(EXIT_CODES["does not fit"]), str(UNCERTAIN)} == set(codes)
    assert vramprobe("--skill").stdout == SKILL
    front = SKILL.split("---")[1]
    assert re.search(r"^name: [a-z-]{1,64}$", front, re.MULTILINE)
    assert len(re.search(r"^description: (.*)$", front, re.MULTILINE)[1]) <= 1024


def test_an_option_is_a_flag_as_the_command_line_has_it() -> None:
    assert served.argument_words("predict", "gradient_checkpointing", True) == ["--gradient-checkpointing"]
    assert served.argument_words("predict", "gradient_checkpointing", False) == ["--no-gradient-checkpointing"]
    assert served.argument_words("predict", "changes", False) == []
    assert served.argument_words("predict", "gpu", None) == []
    assert served.argument_words("predict", "seq_len", "2k") == ["--seq-len=2k"]
    assert served.argument_words("predict", "--gpu", ["T4", "L4"]) == ["--gpu=T4", "--gpu=L4"]


def test_a_tool_answers_what_the_command_prints() -> None:
    found = json.loads(served.predict_tool(**CELL, gpu="RTX-3060"))
    done = vramprobe("predict", *flags(CELL), "--gpu=RTX-3060", "--json")
    assert (found["exit_code"], found["answer"]) == (done.returncode, json.loads(done.stdout))
    assert found["verdict"] == "does not fit"
    assert "verdict" not in json.loads(served.predict_tool(**CELL))


def test_a_bad_call_says_what_is_allowed() -> None:
    with pytest.raises(VramprobeError, match="lora"):
        served.predict_tool(**CELL | {"method": "qloar"}, gpu="T4")


def test_the_tools_by_the_sdks_own_client(tmp_path: Path) -> None:
    """Over stdin and stdout of ``vramprobe mcp``, as an agent starts it."""
    mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed: pip install 'vramprobe[mcp]'")
    from mcp.client.stdio import StdioServerParameters

    calls: dict[str, dict[str, Any]] = {
        "predict": {**CELL, "gpu": "RTX-4090", "options": {"gradient_checkpointing": True}},
        "explain": {"log": OUT_OF_MEMORY},
        "recommend": {"model": "llama-3.1-8b", "method": "qlora", "seq_len": 2048, "tokens": "50M"},
        "techniques": {"kind": "optimizer"},
        "profile": {"command": ["no-such-program"], "gpu": "RTX-4090"},
    }
    assert set(calls) == TOOLS
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join([HERE, *sys.path])}

    async def talk() -> tuple[list[str], dict[str, Any]]:
        command = StdioServerParameters(
            command=sys.executable, args=["-m", "vramprobe", "mcp"], cwd=tmp_path, env=environment
        )
        async with mcp.Client(command) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            return names, {name: await client.call_tool(name, words) for name, words in calls.items()}

    names, results = asyncio.run(talk())
    assert set(names) == TOOLS
    answers = {name: json.loads(one.content[0].text) for name, one in results.items() if not one.is_error}
    assert set(answers) == TOOLS - {"profile"}
    assert answers["predict"]["verdict"] == "fits"
    assert answers["recommend"]["answer"]
    assert "no-such-program" in results["profile"].content[0].text
