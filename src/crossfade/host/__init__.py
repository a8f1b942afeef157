"""Operating-system words: shared memory, semaphores, doorbells, keyed frames and private sockets, watching processes die.

No CUDA, no torch, and no idea of graphs.
"""
