"""Starts interpreters that find modules where this one does.

The search path is passed in inherited memory: an argument of a program takes 128 KB at most, and any user can read it.
"""

from __future__ import annotations

import marshal
import os
import sys

from crossfade.host.memory import Memory

_STDERR = 2

_CODE = """import marshal, sys
with open({fd}, "rb") as file:
    sys.path[:] = marshal.load(file)
from {module} import main
main({arguments})
"""


def open_standard_streams() -> None:
    """Opens ``/dev/null`` as those of stdin, stdout and stderr that this process has closed. Other descriptors would have their
    numbers else, so that programs that are started here would lose those, or write into them.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(fd, True)
    os.close(fd)


def search_path() -> Memory:
    """Makes memory with the search path, for another interpreter to inherit; `code_to_run` reads it and closes it there."""
    memory = Memory.create("search-path", 0)
    data = memoryview(marshal.dumps([str(entry) or os.getcwd() for entry in sys.path]))
    try:
        start = 0
        while start < len(data):
            start += os.pwrite(memory.fd, data[start:], start)  # the position stays at the beginning
    except BaseException:
        memory.close()
        raise
    return memory


def code_to_run(path_fd: int, module: str, *arguments: object) -> str:
    """Returns the code for ``python -c``: it calls the module's ``main`` with plain arguments."""
    return _CODE.format(fd=path_fd, module=module, arguments=", ".join(map(repr, arguments)))
