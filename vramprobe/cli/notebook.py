"""``%load_ext vramprobe``, ``%vramprobe``: the memory of a notebook's own kernel, so far.

In: an IPython shell. Out: the profile on stdout, as ``vramprobe profile`` prints it. The kernel has the same hook as a
command's processes (profile/hook), from the extension's loading on; nothing of it is ended.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from vramprobe.cli.emulate import say
from vramprobe.errors import SpecError, VramprobeError


def load(shell: Any) -> None:
    """Hook this process, unless ``vramprobe profile`` has, and give the shell its magic."""
    from vramprobe.profile import launch

    if not os.environ.get(launch.FOLDER_VARIABLE):
        launch.hook_this_process()
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            say("load it before anything is on the card; whose lines asked for what is there is not known")
    shell.register_magic_function(show, "line", "vramprobe")


def show(line: str) -> None:
    """What ``%vramprobe [--gpus all|NAMES] [--save FILE.jsonl] [--timeline FILE.html]`` prints."""
    from vramprobe.cli import display_profile
    from vramprobe.cli.profile import analysed
    from vramprobe.profile import launch

    try:
        asked = _asked(line)
        launch.write_what_was_seen()
        record = analysed(Path(os.environ[launch.FOLDER_VARIABLE]), asked.gpus, asked.timeline, asked.save)
        display_profile.print_profile(record)
    except VramprobeError as error:
        say(str(error))


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(f"%vramprobe: {message}; it takes --gpus, --save and --timeline")


def _asked(line: str) -> argparse.Namespace:
    words = _Words(prog="%vramprobe", add_help=False)
    words.add_argument("--gpus")
    words.add_argument("--save", type=Path)
    words.add_argument("--timeline", type=Path)
    return words.parse_args(shlex.split(line))
