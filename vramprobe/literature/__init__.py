"""The literature: what others measured, the formulas they quote, the claims they make, each with its source.

In: published rows, formulas and claims that ship under data/, and our records. Out: differences by library version,
formulas scored and their constants as measured, a verdict for each claim. It stays this side of the torch line; what a
claim says is judged by kept predictions, fits and records.
"""
