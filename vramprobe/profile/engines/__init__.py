"""Read inference engines' own accounts of their memory from their logs: one module per engine.

In: lines that an engine logged (hook/engine_log.py kept them). Out: an EngineMemory, or None.
Computes nothing, needs no torch and no engine.
"""
