"""Operating-system words: shared memory, semaphores, doorbells, keyless private sockets, watching processes die.

No CUDA, no torch, and no idea of graphs.
"""
