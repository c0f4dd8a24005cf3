"""The command line: words in, text or JSON out; the only room that prints and exits.

In: what a user typed. Out: one call of api.py for each verb, shown in a terminal or as JSON, and an exit code. Nothing
imports it but ``__main__``; it stays this side of the torch line, and loads no pandas or matplotlib at import.
"""
