"""Traces of torch.profiler: reading them, and what their structure says.

::

    chrome.py       the events of a file in Chrome's format, a piece at a time
    events.py       what is kept of them: GPU activities, CUDA calls of the host, operators, collectives
    roles.py        what a CUDA call is for
    record.py       what `crossfade.record` adds to a file
    reader.py       a file becomes a `RankTrace`
    launches.py     which call launched which activity, in which order
    collectives.py  how collectives of several ranks match, and how far the ranks' clocks are apart
    waits.py        what waits for what
    default_stream.py  what waits for the default stream, and the reverse
    exact.py        the same where there is a record: which event, on which stream
    tensors.py      what makes the input of each collective, where a record has tensors
    steps.py        where steps begin

Importing this room does not import torch: a trace is read on any machine.
"""
