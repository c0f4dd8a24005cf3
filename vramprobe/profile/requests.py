"""Requests to a server that is profiled: sent once it answers, and then it is ended.

In: a command's words and ``NUMBERxPROMPTxCOMPLETION`` tokens. Out: what each request got. Servers speak OpenAI's API
(vLLM, SGLang), on 127.0.0.1 and the port of the command; standard library alone.
"""

import http.client
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vramprobe.errors import SpecError
from vramprobe.profile.hook import settle
from vramprobe.profile.interpreter import value_of

#: (words of a command that starts a server, its port where --port gives none).
SERVERS = {
    ("vllm", "serve"): 8000,
    ("vllm.entrypoints.openai.api_server",): 8000,
    ("trl", "vllm-serve"): 8000,
    ("sglang.launch_server",): 30000,
    ("sglang", "serve"): 30000,
}
START_SECONDS, ANSWER_SECONDS, SETTLE_SECONDS = 1800.0, 600.0, 300.0
DEAD_SECONDS = 120.0  # since every process that used a GPU has ended: a server ends within seconds, or never
_POLL_SECONDS = 0.5
_ENDING_SECONDS = 5.0  # of a command whose server has failed
_TOKEN = 5  # any that is no special token of a tokenizer
_FORM = re.compile(r"(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True, kw_only=True)
class ServerRequests:
    """So many at once, each of ``prompt_tokens``, answered by ``completion_tokens``."""

    number: int
    prompt_tokens: int
    completion_tokens: int
    port: int

    def __str__(self) -> str:
        each = f"{self.prompt_tokens:,} + {self.completion_tokens:,} tokens"
        return f"1 request of {each}" if self.number == 1 else f"{self.number:,} requests of {each}"


def requests_of(said: str | None, command: Sequence[str]) -> ServerRequests | None:
    """Parse ``--requests``; without it one short request where the command starts a server, else None.

    Raises SpecError for another form, and where the command starts no server that is known and names no --port.
    """
    port = _port(command)
    if said is None:
        return ServerRequests(number=1, prompt_tokens=32, completion_tokens=8, port=port) if _server(command) else None
    match = _FORM.fullmatch(said)
    numbers = [int(one) for one in match.groups()] if match else []
    if not numbers or min(numbers) < 1:
        raise SpecError(
            f"--requests {said}: give NUMBERxPROMPTxCOMPLETION, for example 4x1024x128: 4 requests at once, each of "
            "1,024 tokens answered by 128"
        )
    if port is None:
        raise SpecError(
            f"--requests {said} is for a server: vllm serve, python -m sglang.launch_server, or any command with "
            "--port that speaks OpenAI's API"
        )
    return ServerRequests(number=numbers[0], prompt_tokens=numbers[1], completion_tokens=numbers[2], port=port)


def _server(command: Sequence[str]) -> int | None:
    """The port that the command's server has by default; None for no server."""
    names = [word.rsplit("/", 1)[-1] for word in command]
    for words, port in SERVERS.items():
        length = len(words)
        if any(tuple(names[at : at + length]) == words for at in range(len(names))):
            return port
    return None


def _port(command: Sequence[str]) -> int | None:
    said = value_of(command, "--port")
    return int(said) if said and said.isdigit() else _server(command)


def require_free_port(requests: ServerRequests) -> None:
    """Raises SpecError where another program answers on the server's port: it would be asked in its place."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", requests.port), timeout=1):
        raise SpecError(
            f"port {requests.port} is another program's, and the server could not be reached there: end that program, "
            "or give the command another --port"
        )


class Client:
    """Sends the requests from a thread of its own, then calls ``end``. ``close`` where the command has ended."""

    def __init__(
        self, requests: ServerRequests, folder: Path, end: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self._requests, self._folder, self._end, self._say = requests, folder, end, say
        self._url = f"http://127.0.0.1:{requests.port}"
        self._closed, self._failed = threading.Event(), threading.Event()
        self.answers: list[dict[str, Any]] | None = None  # None until all are there
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send no more."""
        self._closed.set()
        self._thread.join(2 * _POLL_SECONDS)

    def _run(self) -> None:
        if not self._is_up():
            return
        self._say(f"the server answers: {self._requests}, then it is ended")
        with ThreadPoolExecutor(self._requests.number) as pool:
            answers = list(pool.map(lambda _: self._answer(), range(self._requests.number)))
        for why in dict.fromkeys(one["error"] for one in answers if one["error"]):
            self._say(f"the server answered a request with an error: {why}")
        if self._failed.is_set() and self._closed.wait(_ENDING_SECONDS):
            return  # it has ended by itself, with a status of its own
        self.answers = answers
        self._settle()
        self._end()

    def _settle(self) -> None:
        """Wait until every process that is watched has written what it was seen to do (hook/settle.py)."""
        until = time.monotonic() + SETTLE_SECONDS
        with suppress(OSError):
            (self._folder / settle.FILE).touch()
        while time.monotonic() < until and not all(map(_is_settled, self._folder.glob("*.jsonl"))):
            if self._closed.wait(_POLL_SECONDS):
                return

    def _is_up(self) -> bool:
        """Wait until it is; False where the command has ended, or does not come up and is ended."""
        until, dead_since = time.monotonic() + START_SECONDS, None
        while not self._closed.wait(_POLL_SECONDS):
            with suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=10) as answer:
                if answer.status == 200:
                    return True
            now, why = time.monotonic(), ""
            dead_since = (dead_since or now) if self._is_dead() else None
            if now > until:
                why = f"it has not answered for {START_SECONDS / 60:.0f} minutes"
            elif dead_since is not None and now - dead_since > DEAD_SECONDS:
                why = "every process that used a GPU has ended, and the server goes on without its engine"
            if why:
                self._say(f"{self._url}: {why}; the command is ended. Is this the server's port (--port)?")
                self._end()
                return False
        return False

    def _is_dead(self) -> bool:
        """Return True if processes have used a GPU, and none of them is left."""
        journals = list(self._folder.glob("*.jsonl"))
        return bool(journals) and not any(map(is_alive, journals))

    def _asked(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)

    def _answer(self) -> dict[str, Any]:
        """{completion_tokens, error}: one of them is null."""
        body: dict[str, Any] = {"prompt": [_TOKEN] * self._requests.prompt_tokens, "temperature": 0}
        body |= {"max_tokens": self._requests.completion_tokens, "ignore_eos": True}
        try:
            body["model"] = self._asked("/v1/models")["data"][0]["id"]
            usage = self._asked("/v1/completions", body)["usage"]
            return {"completion_tokens": usage["completion_tokens"], "error": None}
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                self._failed.set()
            return {"completion_tokens": None, "error": error.read(300).decode(errors="replace")}
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            self._failed.set()
            return {"completion_tokens": None, "error": f"{type(error).__name__}: {error}"}


def _is_settled(journal: Path) -> bool:
    """Return True if a process has written its end, as of now, or is no more."""
    with suppress(OSError):
        return not is_alive(journal) or b'{"line": "end"' in journal.read_bytes()
    return True


def is_alive(journal: Path) -> bool:
    """Return True if the process of a journal runs."""
    with suppress(psutil.Error):
        return psutil.Process(int(journal.stem)).status() != psutil.STATUS_ZOMBIE
    return False
