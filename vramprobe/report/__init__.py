"""Results, and a fit when there is one → tables (Markdown, CSV, LaTeX, HTML), plots and a page with a calculator.

In: a results file or folder, of cells, profiles or both, and a CardFit. Out: files, the same bytes each time, each
with the command that rebuilds it (publish.py). Never measures or fits, stays this side of the torch line, and hides
nothing measured: failures have their own table.
"""
