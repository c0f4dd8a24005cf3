"""A data set → the Hugging Face hub, in one commit.

In: file name → content, and NAMESPACE/NAME. Out: the address of the commit. Never stores, shows or asks for a token.
"""

from collections.abc import Mapping
from typing import Any

from vramprobe.errors import MissingDependency, VramprobeError, require_extra


def push(files: Mapping[str, bytes], repo: str) -> str:
    """Upload ``files`` to the data set ``repo``, made where it is missing; the commit's address.

    Raises VramprobeError for a bad name, without a token, and with the hub's own words where it refuses or cannot be
    reached.
    """
    hub = require_name(repo)
    token = hub.get_token()
    if token is None:
        raise MissingDependency(
            f"no token to push {repo} with: set HF_TOKEN to one that may write, or log in with `hf auth login`"
        )
    api = hub.HfApi(token=token)
    # Without a network it is httpx's error or requests', by the hub's release; both are its HTTPError or an OSError.
    failures = (OSError, getattr(hub.errors, "HTTPError", OSError))
    try:
        api.create_repo(repo, repo_type="dataset", exist_ok=True)
        commit = api.create_commit(
            repo,
            [hub.CommitOperationAdd(name, content) for name, content in files.items()],
            repo_type="dataset",
            commit_message=f"Publish {len(files)} files with vramprobe",
        )
    except failures as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise VramprobeError(
            f"{repo} was not pushed ({type(error).__name__}: {said}); the token must be allowed to write there, and "
            "the hub must be reachable"
        ) from error
    return commit.commit_url


def require_name(repo: str) -> Any:
    """The package huggingface_hub, if ``repo`` is a NAMESPACE/NAME that it would take; else raises VramprobeError."""
    require_extra("hub", "pushing a data set")
    import huggingface_hub as hub
    import huggingface_hub.errors
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        if repo.count("/") == 1:
            return hub
        why = "it has no namespace"
    except hub.errors.HFValidationError as error:
        why = str(error).splitlines()[0]
    raise VramprobeError(f"{repo!r} is no name of a data set: {why}; write NAMESPACE/NAME, such as someone/vram-runs")
