"""A command that was profiled is run once more, on its first batch in other shapes, and its recipe kept.

In: the command, the folder of its profile, what was asked of it. Out: ``recipe`` in the folder (recipe/command.py), or
in its run.json why there is none. The second run is on an emulated GPU without an end, so that no shape is too large.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vramprobe.emulate.cards import parse_cards
from vramprobe.errors import VramprobeError
from vramprobe.profile import launch
from vramprobe.profile.this_process import redirected
from vramprobe.recipe.command import FILE_NAME, write_command
from vramprobe.records.profile import ProfileRecord

_STEPS = 3  # of its own, before the other shapes


def keep_recipe(
    command: Sequence[str],
    folder: Path,
    options: launch.Options,
    record: ProfileRecord,
    *,
    emulate: str,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Probe the command and keep its recipe in ``folder``; where that is not possible, say why and note it there."""
    why = _why_not(record, options)  # for who asks predict --from: nobody asked for a recipe by itself
    if not why:
        say("running it once more on other shapes of its batch, to answer later for those (--no-probe leaves it out)")
        probe = folder / "probe"
        probe.mkdir()
        try:
            why = _probed(command, folder, probe, options, emulate, say)
        finally:
            shutil.rmtree(probe, ignore_errors=True)
        if why:
            say(f"no recipe was kept, so vramprobe predict --from cannot answer for other shapes: {why}")
    if why:
        with suppress(OSError, ValueError, VramprobeError):
            launch.write_told(folder, json.loads((folder / "run.json").read_text()) | {"no_recipe": why})


def _why_not(record: ProfileRecord, options: launch.Options) -> str:
    if options.requests is not None or record.engine is not None:
        return "an inference engine sizes its KV cache by the GPU"
    if record.outcome.kind not in ("ok", "oom"):
        return f"the command ended with {record.outcome.kind}"
    if len(record.ranks) > 1 or options.one_rank is not None:
        return "the command runs on several GPUs, and recipes are of commands on one"
    if not any(one.num_steps for one in record.ranks) and record.outcome.kind == "ok":
        return "the command has no training steps"
    return ""


def _probed(
    command: Sequence[str], folder: Path, probe: Path, options: launch.Options, emulate: str, say: Callable[[str], None]
) -> str:
    """Probe and keep the recipe; -> the reason why there is none, "" where it is kept."""
    from vramprobe.profile.probe import command_recipe

    own = replace(options, trace="all", steps=_STEPS, verify=False, phases=False, speed=False, probe=True)
    try:
        with redirected((1, 2), os.devnull):  # its first run was shown
            launch.run(list(command), probe, own, emulate=emulate)
        recipe = command_recipe(probe, command, parse_cards(emulate)[0].gpu.short_name)
        size = write_command(recipe, folder / FILE_NAME)
    except VramprobeError as error:
        return str(error)
    except OSError as error:
        return f"the recipe cannot be written: {error.strerror}"
    shapes = sum(len(one.shapes) for one in recipe.branches)
    say(f"recipe of {shapes} shapes, {size / 1000:.0f} kB: vramprobe predict --from {folder} --batch-size 8 --gpu all")
    return ""
