"""python -m vramprobe, and the ``vramprobe`` command: an interruption is quiet, even while the modules load."""

import gc
import sys

import vramprobe

#: New objects before the garbage collector runs (Python's default is 700): importing libraries takes a tenth less time.
_COLLECT_AFTER = 100_000


def main() -> None:
    """Run the command line."""
    if sys.platform == "win32":  # no fcntl, no signals between processes
        sys.exit("vramprobe: it runs on Linux and macOS; on Windows run it in WSL (wsl --install), with a GPU, too")
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"vramprobe {vramprobe.__version__}\n")
        return
    gc.set_threshold(_COLLECT_AFTER)
    try:
        from vramprobe.cli.verbs import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if "torch" not in sys.modules:  # whose libraries report what is not collected as leaks
            gc.freeze()  # the interpreter's last collection takes a third of a short command's time and frees nothing


if __name__ == "__main__":
    main()
