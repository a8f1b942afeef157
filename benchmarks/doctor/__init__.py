"""Planted causes: programs that are slow for a known reason, beside the same program without it.

::

    models.py     the two base models, and chains of products and collectives
    programs.py   each cause, with its fix
    run.py        times both in turns and records their traces: torchrun -m benchmarks.doctor.run OUT
    judge.py      what the doctor says of the traces, beside what was measured
"""
