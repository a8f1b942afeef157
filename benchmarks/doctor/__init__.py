"""Planted causes: programs that are slow for a known reason, beside the same program without it.

::

    models.py      the two base models
    planted.py     what a planted program is, its sizes, training steps
    one_rank.py    causes of one GPU
    two_ranks.py   causes between ranks
    programs.py    the table of all
    run.py         times both sides in turns and records their traces: python -m benchmarks.doctor.run OUT
    worker.py      one rank of a run
    judge.py       what the doctor says of the traces, beside what was measured
    slim.py        makes a trace small enough for a test
    large.py       a trace of a gigabyte
    transformers_traces.py   traces of Hugging Face's transformers
"""
