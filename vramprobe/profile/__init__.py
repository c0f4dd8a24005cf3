"""Profile: the memory of any command's processes, by phase, rank and cause, on the GPU at hand or on an emulated one.

In: a command that nobody changed. Out: its ProfileRecord. The way: launch.py → hook/ in its processes, which writes
files → run_files.py → history_log.py, the Log → phase_spans.py, causes.py → analyzed_rank.py → ranks.py, growth.py,
cards.py, timeline.py … → analyse.py. All but the hook stay this side of the torch line. It never changes the command's
files, and never what it allocates.
"""
