"""Profile: the memory of any command's processes, by phase, rank and cause, on the GPU at hand or on an emulated one.

In: a command that nobody changed. Out: a ProfileRecord, a page, verdicts on other cards, what grew between two. The
hook (hook/) runs in the command's processes and writes files; everything else reads them and stays this side of the
torch line. It never changes the command's files, and never what it allocates.
"""
