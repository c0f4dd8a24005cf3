"""A model's config.json on the hub: from its local cache, else by one short question.

In: a hub id, and the names of the catalog that are like it. Out: the file, or an error that says what to do.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from vramprobe.errors import MissingDependency, UnknownName

ADAPTER_CONFIG = "adapter_config.json"  # peft's
INSTEAD = "Use a slug from `vramprobe models`, or the path of a config.json or of a checkpoint folder"
_SECONDS = 3.0  # for one answer of the hub, asked once


def config_file(hub_id: str, near: Sequence[str]) -> Path:
    """Its config.json, or an adapter's: from the hub's local cache, else by one short question to the hub.

    Raises MissingDependency or UnknownName, which name what is ``near``.
    """
    instead = f"{'Nearest: ' + ', '.join(near) + '. ' if near else ''}{INSTEAD}."
    try:
        from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_download, hf_hub_url
    except ImportError:
        raise MissingDependency(
            f"model {hub_id!r} is not in the catalog, and asking the hub needs the package huggingface_hub; "
            f"install it (pip install 'vramprobe[measure]'). {instead}"
        ) from None
    with suppress(errors.LocalEntryNotFoundError):
        return Path(hf_hub_download(hub_id, "config.json", local_files_only=True))
    if constants.HF_HUB_OFFLINE:
        raise MissingDependency(
            f"model {hub_id!r} is not in the catalog nor in the hub's local cache, and HF_HUB_OFFLINE is set. "
            f"Unset HF_HUB_OFFLINE. {instead}"
        )

    def unknown(advice: str) -> UnknownName:
        return UnknownName("model", hub_id, [], f"{advice} {INSTEAD}.", near=list(near))

    def download(name: str) -> Path:
        # Asked first and without retries: hf_hub_download asks six times, 24 s long, where there is no connection.
        _in_time(lambda: get_hf_file_metadata(hf_hub_url(hub_id, name), timeout=_SECONDS))
        return Path(hf_hub_download(hub_id, name, etag_timeout=_SECONDS))

    try:
        return download("config.json")
    except errors.GatedRepoError:
        raise MissingDependency(
            f"model {hub_id!r} is gated on the hub: accept its terms there and log in (`hf auth login`). {instead}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise unknown("The hub has no such repository, or it is private and you are not logged in.") from None
    except Exception as error:  # of the HTTP client, which is another one in each major release of huggingface_hub
        if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
            with suppress(Exception):
                return download(ADAPTER_CONFIG)
            raise unknown("Its repository has no config.json.") from None
        raise MissingDependency(
            f"model {hub_id!r} is not in the catalog nor in the hub's local cache, and the hub is unreachable "
            f"({error}). Check the connection. {instead}"
        ) from None


def _in_time(ask: Callable[[], Any]) -> None:
    """Wait for ``ask`` as long as an answer of the hub may take: a client's timeout is not that of its name server.

    Raises what it raises, or TimeoutError.
    """
    ended: Queue[Exception | None] = Queue()

    def run() -> None:
        try:
            ask()
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)

    Thread(target=run, daemon=True).start()
    try:
        error = ended.get(timeout=_SECONDS)
    except Empty:
        raise TimeoutError(f"no answer in {_SECONDS:g} s") from None
    if error is not None:
        raise error
