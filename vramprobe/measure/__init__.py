"""HOW a cell is observed: the instruments, what this machine is, and one process per cell.

In: a CellSpec. Out: a RunRecord of what one attempt did, or of how it failed. The process line runs through this room:
isolation.py and launcher.py hand a worker a spec as JSON and get a record as JSON. Beyond the torch line lie worker.py,
the instruments (cpu.py, cuda.py), selftest.py, and what forkserver.py and environment.py load when asked. It never
decides which cells are run (sweep/ does) or what they train (workload/ does).
"""
