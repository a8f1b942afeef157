"""Why communication of a traced program is not hidden, what each fix wins, and a page that shows it.

::

    diagnosis.py    the whole: build, replay, look for causes, weigh each one
    build.py        traces become a program, and stay beside it
    program.py      the program: calls of the host, work on GPUs, and what each waits for
    rates.py        how much works slow each other down; how long each takes alone
    replay.py       the program as it would run
    untraced.py     the program without the profiler
    losses.py       where a GPU computes nothing, and what held back what came next
    view.py         what a search for causes looks at
    causes/         each cause: its evidence, and the change that its fix makes
    changes.py      what fixes change in a program
    observed.py     what a record tells of the machine
    metrics.py      how much communication is hidden
    report.py       a diagnosis as JSON, and for the page
    page.py         the page; page.html and page_parts/ are its frame, styles and scripts

Importing this room does not import torch.
"""
