"""Records: what an attempt at a cell left behind, the append-only journal that holds them, and records as rows.

In: what an instrument observed, or the lines of a journal. Out: frozen RunRecords, rows of numbers and words, and
conditions on cells. The JSON of the process line is made and read here. It stays this side of the torch line, and never
judges whether a record is to be believed (check/ does).
"""
