"""``%load_ext vramprobe``, ``%vramprobe``: the memory of a notebook's own kernel, so far.

In: an IPython shell. Out: the profile on stdout, as ``vramprobe profile`` prints it. The kernel has the same hook as a
command's processes (profile/hook), from the extension's loading on; nothing of it is ended.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from vramprobe.cli.emulate import say
from vramprobe.errors import SpecError, VramprobeError


def load(shell: Any) -> None:
    """Hook this process, unless ``vramprobe profile`` has, and give the shell its magic."""
    from vramprobe.profile import this_process

    if this_process.folder_here() is None:
        this_process.watch()
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            say("load it before anything is on the card; whose lines asked for what is there is not known")
    shell.register_magic_function(show, "line", "vramprobe")


def show(line: str) -> None:
    """Print the profile of this process so far, for ``%vramprobe [--gpus all|NAMES] [--save FILE.jsonl] [--timeline
    FILE.html]``.
    """
    from vramprobe.cli import display_profile
    from vramprobe.profile import this_process
    from vramprobe.profile.command import analysed, named_gpus

    try:
        asked = _asked(line)
        folder = this_process.folder_here()
        if folder is None:
            raise VramprobeError("this kernel is no longer watched: VRAMPROBE_PROFILE is gone from its environment")
        this_process.write_so_far(folder)
        record, failed = analysed(folder, named_gpus(asked.gpus), asked.timeline, asked.save)
        display_profile.print_profile(record)
        for error in failed:
            say(str(error))
    except VramprobeError as error:
        say(str(error))


class _LineParser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SpecError(f"%vramprobe: {message}; it takes --gpus, --save and --timeline")


def _asked(line: str) -> argparse.Namespace:
    words = _LineParser(prog="%vramprobe", add_help=False)
    words.add_argument("--gpus")
    words.add_argument("--save", type=Path)
    words.add_argument("--timeline", type=Path)
    return words.parse_args(shlex.split(line))
