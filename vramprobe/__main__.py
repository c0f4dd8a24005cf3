"""python -m vramprobe, and the ``vramprobe`` command: an interruption is quiet, even while the modules load."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from vramprobe.cli.verbs import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
