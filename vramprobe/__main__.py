"""python -m vramprobe, and the ``vramprobe`` command: an interruption is quiet, even while the modules load."""

import gc
import sys

#: Objects made before the collector looks (700 by itself): what is imported stays, and looking at it costs a tenth.
_COLLECT_AFTER = 100_000


def main() -> None:
    """Run the command line."""
    gc.set_threshold(_COLLECT_AFTER)
    try:
        from vramprobe.cli.verbs import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        gc.freeze()  # Python's last search for cycles, over all that torch made, takes half a second and frees nothing


if __name__ == "__main__":
    main()
