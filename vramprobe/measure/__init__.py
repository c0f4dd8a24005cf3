"""HOW a cell is observed: instruments, the machine's description, one process per cell, the runner."""
