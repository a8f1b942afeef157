"""Measuring the machine, by one process for each GPU; and reading what programs were recorded to do.

::

    calibrate.py    steps one after another; what they give goes into the topology as it comes
    steps.py        what is measured, as data; pure
    crew.py         the processes, from the side of who started them: meetings, time limits, the end of all
    worker.py       a process, from its own side
    context.py      what a measure works with: a device, memory, signals, the gate; meetings
    timing.py       everything behind one gate, between two timers
    carriers.py     how each transport's transfers are enqueued
    bench.py        the seam for what is not a driver's call: matrix products, NCCL, the host's clock
    gpu.py          its side for GPUs, on torch
    measures.py     all measures
    traces/         torch.profiler's files, and what their structure says
    doctor/         why a traced program is slow, and what each fix would win

Importing this room imports neither torch nor cuda.bindings.
"""
