"""CUDA words: exported memory, signals, rings, peer and staged copies, streams, capture, the watchdog.

No graphs, no groups. Everything stands on the small protocol in ``driver.py``, which has three implementations: ``cuda.py`` for
GPUs, ``host_driver.py`` for processes that have none, and ``crossfade.testing.fake``, a deterministic machine that explores
interleavings and names the two operations of a race. Importing this room imports neither torch nor cuda.bindings.
"""
