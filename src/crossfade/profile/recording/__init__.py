"""Recording a program for the doctor: torch.profiler's trace, and beside it what such a trace lacks.

::

    recorder.py   `record`: starts and ends everything, writes a file for each rank
    calls.py      events, waits and synchronisations as torch reports them
    streams.py    which number a stream has in the trace
    tensors.py    which tensors operators read and write
    machine.py    environment, and the GPU's clock and power

What is recorded goes into the trace under one more key, ``crossfade``: the file stays one of torch.profiler's. `traces.record`
reads it.
Importing this room does not import torch.
"""

from crossfade.profile.recording.recorder import Recording, record

__all__ = ["Recording", "record"]
