"""CUDA words: exported memory, signals, rings, peer and staged copies, streams, capture, the watchdog.

No graphs, no groups. Everything stands on the small protocol in ``driver.py``, which has two implementations: ``cuda.py`` for GPUs
and ``fake/``, a deterministic machine that explores interleavings and names the two operations of a race. Importing this room
imports neither torch nor cuda.bindings.
"""
