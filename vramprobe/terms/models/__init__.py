"""The models: each family's forward on the tape, written like transformers' own code.

In: a set-up and a tape. Out: values on the tape. families picks the layer of a ``model_type``; modules has what all
families share; operators has what torch saves for backward. No torch here.
"""
