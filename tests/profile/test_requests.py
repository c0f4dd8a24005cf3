"""Requests to a server that is profiled: a server of a few lines stands in for vLLM's, over HTTP as it does."""

import json
import socket
import sys
from pathlib import Path

import pytest

from vramprobe.errors import SpecError
from vramprobe.profile import launch, requests
from vramprobe.profile.analyse import analyse
from vramprobe.profile.engines import as_served
from vramprobe.profile.raw import RawPhase
from vramprobe.profile.requests import ServerRequests, requests_of
from vramprobe.profile.run_files import read_run

SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, said):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())
    def do_GET(self):
        self.answer(200, {"data": [{"id": "tiny"}]})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("asked.jsonl", "a") as file:
            file.write(json.dumps(asked) + "\\n")
        if len(asked["prompt"]) > 100:
            return self.answer(400, {"message": "the prompt is too long"})
        self.answer(200, {"usage": {"completion_tokens": asked["max_tokens"]}})
    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def test_what_is_asked_for_follows_from_the_option_and_the_command() -> None:
    served = ["/env/bin/vllm", "serve", "Qwen/Qwen3-0.6B"]
    assert requests_of(None, served) == ServerRequests(number=1, prompt_tokens=32, completion_tokens=8, port=8000)
    assert requests_of("4x1024x128", [*served, "--port", "9000"]) == ServerRequests(
        number=4, prompt_tokens=1024, completion_tokens=128, port=9000
    )
    sglang = requests_of(None, ["python", "-m", "sglang.launch_server", "--port=31000"])
    assert sglang.port == 31000
    assert requests_of(None, ["python", "train.py", "--port", "9000"]) is None
    assert str(requests_of("1x10x2", served)) == "1 request of 10 + 2 tokens"


@pytest.mark.parametrize(
    ("said", "command", "words"),
    [
        ("4x1024", ["vllm", "serve"], "give NUMBERxPROMPTxCOMPLETION"),
        ("0x1x1", ["vllm", "serve"], "give NUMBERxPROMPTxCOMPLETION"),
        ("1x2x3", ["python", "train.py"], "is for a server: vllm serve"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(said: str, command: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        requests_of(said, command)


def test_what_an_engine_does_after_its_start_is_serving() -> None:
    """Without an engine, or with a training step, it keeps its name."""

    def names(*phases: str) -> list[str]:
        named = as_served(
            [
                RawPhase(name=one, step=1, start_ns=0, end_ns=1, allocated_end_bytes=0, allocated_peak_bytes=0)
                for one in phases
            ]
        )
        return [one.name for one in named]

    started = ["load", "engine_load", "load", "engine_kv_cache", "load", "engine_warmup"]
    assert names(*started, "load", "evaluation", "other") == [
        "load", "engine_load", "engine_load", "engine_kv_cache", "engine_kv_cache", "engine_warmup", *["serving"] * 3
    ]  # fmt: skip
    assert names("load", "evaluation", "other") == ["load", "evaluation", "other"]
    assert names("engine_load", "evaluation", "backward") == ["engine_load", "evaluation", "backward"]
    cycle = ["sleep", "serving", "other", "wake_up", "weight_sync"]  # a trainer elsewhere has it so
    found = names("engine_load", "load", "engine_warmup", *cycle, "load", "serving", "evaluation", "other", *cycle)
    assert found[:3] == ["engine_load", "engine_load", "engine_warmup"]
    assert found[3:9] == ["sleep", "other", "other", "wake_up", "weight_sync", "other"]
    assert found[9:] == ["serving", "serving", "serving", *found[3:8]]
    own = ["engine_load", "sleep", "serving", "forward", "backward"]
    assert names(*own) == [*own[:2], "generation", *own[3:]]


def served(folder: Path, script: str, asked: ServerRequests) -> tuple[launch.Ended, list[str]]:
    (folder / "server.py").write_text(script)
    (folder / "run").mkdir()
    said: list[str] = []
    options = launch.Options(trace="none", steps=None, requests=asked)
    command = [sys.executable, "server.py", "--port", str(asked.port)]
    return launch.run(command, folder / "run", options, say=said.append), said


def test_a_port_that_another_program_has_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SpecError, match=f"port {port} is another program's"):
            served(
                tmp_path,
                "open('started', 'w')",
                ServerRequests(number=1, prompt_tokens=1, completion_tokens=1, port=port),
            )
    assert not (tmp_path / "started").exists()


#: A server that waits for an engine that is no more, and says so to nobody.
OUTLIVES_ITS_ENGINE = """
import os, pathlib, subprocess, sys, time
engine = subprocess.Popen([sys.executable, "-c", "pass"])
pathlib.Path("run", f"{engine.pid}.jsonl").write_text("")
engine.wait()
time.sleep(600)
"""


def test_a_server_without_its_engine_is_ended_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requests, "DEAD_SECONDS", 0.0)
    monkeypatch.setattr(requests, "START_SECONDS", 30.0)  # by then another line would have ended it
    asked = ServerRequests(number=1, prompt_tokens=1, completion_tokens=1, port=free_port())
    ended, lines = served(tmp_path, OUTLIVES_ITS_ENGINE, asked)
    assert (ended.exit_status, ended.stopped) == (143, False)
    assert ["goes on without its engine" in line for line in lines] == [True]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize(("prompt_tokens", "num_ok"), [(10, 3), (200, 0)], ids=["answered", "refused"])
def test_a_server_is_asked_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompt_tokens: int, num_ok: int
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ServerRequests(number=3, prompt_tokens=prompt_tokens, completion_tokens=7, port=free_port())
    ended, said = served(tmp_path, SERVER.replace("sys.argv[2]", str(asked.port)), asked)
    assert (ended.exit_status, ended.stopped, ended.num_left) == (0, True, 0)
    got = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert [(len(one["prompt"]), one["max_tokens"], one["model"]) for one in got] == [(prompt_tokens, 7, "tiny")] * 3
    record = analyse(tmp_path / "run")
    assert [one.completion_tokens for one in record.answers] == [7] * num_ok + [None] * (3 - num_ok)
    assert any("the prompt is too long" in line for line in said) == (num_ok == 0)


#: Its engine, a process of its own: it says what it did when it is asked to, and is killed by its server at the end.
ENGINE = """
import json, os, pathlib, signal, subprocess, sys, time

folder = pathlib.Path(os.environ["VRAMPROBE_PROFILE"])
with open(folder / f"{os.getpid()}.jsonl", "a") as journal:
    print(json.dumps({"line": "process", "pid": os.getpid()}), file=journal, flush=True)
    while not (folder / "settle").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    print(json.dumps({"line": "end", "why": "so far"}), file=journal, flush=True)
    time.sleep(600)
"""
KILLS_ITS_ENGINE = """
import pathlib, signal, subprocess, sys
engine = subprocess.Popen([sys.executable, "engine.py"])
signal.signal(signal.SIGTERM, lambda *_: (engine.kill(), sys.exit(0)))
while not list(pathlib.Path("run").glob("*.jsonl")):
    pass
"""


@pytest.mark.parametrize("settles", [True, False])
def test_an_engine_says_what_it_did_before_its_server_kills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requests, "SETTLE_SECONDS", 600.0 if settles else 0.1)
    asked = ServerRequests(number=1, prompt_tokens=1, completion_tokens=1, port=free_port())
    (tmp_path / "engine.py").write_text(ENGINE if settles else ENGINE.replace('"settle"', '"never"'))
    served(tmp_path, KILLS_ITS_ENGINE + SERVER.replace("sys.argv[2]", str(asked.port)), asked)
    (engine,) = read_run(tmp_path / "run").ranks
    assert (engine.end is not None) == settles
    assert any("has not written" in said for said in analyse(tmp_path / "run").warnings) != settles


def test_a_server_that_ends_by_itself_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ServerRequests(number=1, prompt_tokens=1, completion_tokens=1, port=free_port())
    ended, _ = served(tmp_path, "raise SystemExit(3)", asked)
    assert (ended.exit_status, ended.stopped) == (3, False)
    assert analyse(tmp_path / "run").answers == []


@pytest.mark.parametrize("place", ["do_GET", "do_POST"])
def test_a_server_that_dies_of_a_request_has_its_own_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ServerRequests(number=2, prompt_tokens=1, completion_tokens=1, port=free_port())
    dies = f"def {place}(self):\n        if self.path != '/health': import os; os._exit(3)"
    ended, _ = served(
        tmp_path, SERVER.replace(f"def {place}(self):", dies).replace("sys.argv[2]", str(asked.port)), asked
    )
    assert (ended.exit_status, ended.stopped) == (3, False)
    assert analyse(tmp_path / "run").answers == []


def test_a_server_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requests, "START_SECONDS", 1.0)
    monkeypatch.setattr(requests, "DEAD_SECONDS", 0.0)  # no process has used a GPU: none is missed
    asked = ServerRequests(number=1, prompt_tokens=1, completion_tokens=1, port=free_port())
    ended, said = served(tmp_path, "import time; time.sleep(600)", asked)
    assert ended.exit_status == 143
    assert [f"127.0.0.1:{asked.port}: it has not answered for 0 minutes" in line for line in said] == [True]
