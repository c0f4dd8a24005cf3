"""A command → its profile: what is asked of the hook, the run's folder, the analysis, what is kept and drawn.

In: a command's words and what is asked, or the folder of a run that has ended. Out: Profiled. It says nothing itself:
``say`` hears what a reader should know.
"""

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramprobe.errors import SpecError, VramprobeError
from vramprobe.profile import launch
from vramprobe.profile.interpreter import value_of
from vramprobe.profile.requests import requests_of
from vramprobe.profile.stand_ins import stand_ins
from vramprobe.records.profile import ProfileRecord
from vramprobe.units import parse_bytes

_TRACES = ("all", "step", "none")
_MAX_RANKS = 960  # of the emulated NCCL
_MOST_AT_ONCE = 64  # profiles whose folders have a path that the next run takes again
_SEVERAL_MACHINES = ("--nnodes", "--num-machines", "--num-nodes")
_Say = Callable[[str], None]


class NoProfile(VramprobeError):
    """The command ran, and no profile can be made of what it left; ``exit_status`` is the command's own."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """``failed``: why the profile could not be kept or drawn, as was asked. ``exit_status``: the command's own.

    ``folder``, ``options``: where its processes wrote, and what was asked of them.
    """

    record: ProfileRecord
    failed: list[VramprobeError]
    exit_status: int
    folder: Path
    options: launch.Options


def profile(command: Sequence[str] | str = (), *, say: _Say = lambda line: None, **asked: Any) -> ProfileRecord:
    """Run a training command, on a GPU or with ``emulate="RTX-4090"``, and return where its GPU memory went.

    ``command``: its words, or one text. ``asked``: the options of ``vramprobe profile`` by name, such as
    ``gpus="RTX-4090,A100-80GB-SXM"`` (a verdict for each), ``empty_weights=True``, ``steps=3``, ``save=PATH``; or
    ``from_folder=PATH`` in place of a command. A command that fails is a profile, too: see its ``outcome``.

    Raises SpecError for what cannot be, NoProfile where the command left nothing, StoreError where it cannot be kept.
    """
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    done = profiled(words, say=say, **asked)
    for error in done.failed:
        raise error
    return done.record


def profiled(
    command: list[str],
    *,
    emulate: str | None = None,
    empty_weights: bool = False,
    seq_len: int | None = None,
    image_size: str | None = None,
    video_size: str | None = None,
    audio_seconds: float | None = None,
    steps: int | None = None,
    whole: bool = False,
    steps_only: bool = False,
    trace: str | None = None,
    verify: bool = False,
    speed: bool = True,
    only_rank: int | None = None,
    world_size: int | None = None,
    gpus: str | None = None,
    requests: str | None = None,
    host_memory: str | None = None,
    replay_steps: int | None = None,
    timeline: str | Path | None = None,
    save: str | Path | None = None,
    folder: str | Path | None = None,
    from_folder: str | Path | None = None,
    say: _Say = lambda line: None,
    replaying: AbstractContextManager[Any] | None = None,
) -> Profiled:
    """Run the command, or read ``from_folder``, and analyse what its processes wrote; raises as :func:`profile`.

    ``replaying``: entered while steps are replayed.
    """
    timeline, save, folder, from_folder = map(_path, (timeline, save, folder, from_folder))
    given = {"--seq-len": seq_len, "--image-size": image_size, "--video-size": video_size}
    given["--audio-seconds"] = audio_seconds and f"{audio_seconds:g}"
    _require_emulated(emulate, empty_weights, given, from_folder is not None, host_memory, replay_steps)
    _require_steps(emulate, whole=whole, steps=steps, steps_only=steps_only, verify=verify)
    if trace is not None and trace not in _TRACES:
        raise SpecError(f"--trace {trace}: one of {', '.join(_TRACES)}")
    if replay_steps is not None and from_folder is None and (whole or steps_only or trace):
        raise SpecError(_no_replay(replay_steps))
    if timeline is not None:
        from vramprobe.report.timeline_file import require_writable

        require_writable(timeline, also=(".json",))
    options = launch.Options(
        trace=trace or ("all" if emulate else "step"),
        steps=steps if steps is not None else 3 if emulate and not whole else None,
        verify=verify,
        phases=emulate is not None and not (steps_only or verify),
        speed=speed,
        one_rank=_one_rank(command, emulate, only_rank, world_size),
        stand_ins=stand_ins(seq_len, image_size, video_size, audio_seconds) if empty_weights else None,
        requests=None if whole and requests is None else requests_of(requests, command),
    )
    host_memory_bytes = None if host_memory is None else parse_bytes(host_memory)
    if bool(command) == (from_folder is not None):
        raise SpecError("give a command after --, as in vramprobe profile -- python train.py, or --from a folder")
    names = named_gpus(gpus)  # before the command runs, whose profile would be lost
    with _home(folder, from_folder, say) as home:
        status = launch.run(command, home, options, emulate=emulate, say=say).exit_status if command else 0
        try:
            with replaying or nullcontext():
                record, failed = analysed(home, names, timeline, save, host_memory_bytes, replay_steps)
        except VramprobeError as error:
            raise NoProfile(str(error), status) from None
    return Profiled(record=record, failed=failed, exit_status=status, folder=home, options=options)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _require_emulated(
    emulate: str | None,
    empty_weights: bool,
    sizes: Mapping[str, Any],
    is_over: bool,
    host_memory: str | None,
    replay_steps: int | None,
) -> None:
    """Raise SpecError for what needs an emulated GPU, and for sizes of rows that nobody makes."""
    if empty_weights and emulate is None:
        raise SpecError(
            "--empty-weights is for an emulated card, where nothing is computed: add --emulate GPU, or drop it"
        )
    of_what = ("how long the rows are", "how large the images are", "how large the videos are", "how long the sound is")
    for (option, value), what in zip(sizes.items(), of_what, strict=True):
        if value is not None and not empty_weights:
            raise SpecError(f"{option} {value} is {what} that --empty-weights makes: add it, or drop this")
    if host_memory is not None and emulate is None and not is_over:
        raise SpecError(f"--host-memory {host_memory}: only an emulated GPU's driver counts it; add --emulate GPU")
    if replay_steps is not None and emulate is None and not is_over:
        raise SpecError(_no_replay(replay_steps))


def _require_steps(emulate: str | None, *, whole: bool, steps: int | None, steps_only: bool, verify: bool) -> None:
    if verify and (emulate is None or (whole and steps is None)):
        raise SpecError(
            "--verify runs more steps of the command under other values: give --emulate GPU, and no --whole"
        )
    if steps_only and (emulate is None or whole):
        raise SpecError("--steps-only shortens what --emulate GPU runs: add --emulate, and no --whole")


def _no_replay(replay_steps: int) -> str:
    return (
        f"--replay-steps {replay_steps}: only an emulated run asks its data for all batches and records what each "
        "step requests: add --emulate GPU, without --whole, --steps-only and --trace"
    )


def analysed(
    home: Path,
    gpus: Sequence[str] | str | None,
    timeline: Path | None,
    save: Path | None,
    host_memory_bytes: int | None = None,
    replay_steps: int | None = None,
) -> tuple[ProfileRecord, list[VramprobeError]]:
    """Return the profile of a run's folder, kept and drawn where that is asked for; and why it could not be, since it
    is to be shown all the same.
    """
    from vramprobe.profile.analyse import analyse

    record = analyse(home, gpus=gpus, host_memory_bytes=host_memory_bytes, replay_steps=replay_steps)
    failed: list[VramprobeError] = []
    if save is not None:
        from vramprobe.records import writing

        try:
            writing.append(save, record)
        except VramprobeError as error:
            failed.append(error)
    if timeline is not None:
        from vramprobe.profile.timeline import write

        try:
            write(home, record, timeline)
        except VramprobeError as error:
            failed.append(error)
    return record, failed


@contextmanager
def _home(folder: Path | None, from_folder: Path | None, say: _Say = lambda line: None) -> Iterator[Path]:
    """Yield the folder to which the processes write: a new one, a temporary one, or an earlier run's. A temporary one
    stays if no profile could be made from it.
    """
    if folder is not None or from_folder is not None:
        yield from_folder if folder is None else _new(folder)
        return
    home = _temporary()
    try:
        yield home
    except BaseException:
        if any(home.glob("*.jsonl")):
            say(f"what the processes said stays in {home}: vramprobe profile --from {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)
        raise
    shutil.rmtree(home, ignore_errors=True)


def _temporary() -> Path:
    """A new folder at the first free of a few paths, so that the next run has the same path again: vLLM finds what it
    has compiled by the path of its model, which may be an empty one in here."""
    for number in range(_MOST_AT_ONCE):
        home = Path(tempfile.gettempdir(), f"vramprobe-profile-{os.getuid()}-{number}")
        with suppress(FileExistsError):
            home.mkdir(mode=0o700)
            return home
    return Path(tempfile.mkdtemp(prefix="vramprobe-profile-"))


def _one_rank(
    command: list[str], emulate: str | None, rank: int | None, world_size: int | None
) -> tuple[int, int] | None:
    """Raises SpecError for what is no rank of a world, and for a launcher that waits for other machines."""
    if rank is None and world_size is None:
        return None
    if rank is not None and world_size is None and emulate is not None:
        from vramprobe.emulate.cards import parse_cards

        num_cards = parse_cards(emulate)[1]
        world_size = num_cards if num_cards > 1 else None  # as measure reads 'GPU x8'
    if rank is None or world_size is None or emulate is None:
        given = f"--only-rank {'–' if rank is None else rank}, --world-size {'–' if world_size is None else world_size}"
        raise SpecError(f"{given}: give both and --emulate GPU, or --only-rank and --emulate 'GPU x8', one of 8 ranks")
    if not 0 <= rank < world_size <= _MAX_RANKS:
        raise SpecError(f"--only-rank {rank} --world-size {world_size}: 1 to {_MAX_RANKS} ranks, numbered from 0")
    for option in _SEVERAL_MACHINES:
        if (value := value_of(command, option)) not in (None, "1", "1:1"):
            raise SpecError(
                f"{option} {value}: the launcher would wait for other machines; leave it out, --world-size says how "
                "many ranks there are"
            )
    return rank, world_size


def named_gpus(gpus: str | None) -> list[str] | str | None:
    """Parse ``--gpus``: None, "all", or the catalog's names. Raises UnknownName."""
    if gpus is None or gpus == "all":
        return gpus
    from vramprobe.catalog import gpu_or_size

    return [gpu_or_size(name.strip()).short_name for name in gpus.split(",") if name.strip()]


def _new(folder: Path) -> Path:
    """Raises SpecError where it is there already: what is kept there is another run's."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SpecError(f"--folder {folder} is there already: name a new one") from None
    except OSError as error:
        raise SpecError(f"--folder {folder} cannot be made: {error.strerror}; name another") from None
    return folder.resolve()
