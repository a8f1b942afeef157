"""A matrix product and its collective as one operator, and how the way to do it is chosen.

A *candidate* is one way to do a whole operator, with its parameters. `model` predicts how long each takes, from `figures` that were
measured once; `tune` measures the best few and decides, alike on all ranks; `cache` keeps what was decided. docs/tuning.md shows it
from outside, docs/decisions/0013-tile-operators.md says why it is so.

Importing this room imports neither torch nor triton.
"""
