"""python -m vramprobe: the same as the ``vramprobe`` command."""

from vramprobe.cli import main

main()
