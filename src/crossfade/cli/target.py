"""What users hand to commands: files of figures, and ``MODULE:FUNCTION``, whose module is imported and the function called."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import crossfade
from crossfade.cli.exits import UsersMistake, told
from crossfade.errors import MissingDependency
from crossfade.schedule.cost import CostModel
from crossfade.schedule.workload import Workload
from crossfade.topology import Topology

_Figures = TypeVar("_Figures", Topology, CostModel, Workload)


def read_figures(kind: type[_Figures], path: Path) -> _Figures:
    """Reads what ``to_json`` of such figures wrote, or a person did."""
    with told(f"cannot read {path}", hint="name a file that exists"):
        text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return kind.from_json(text)
    except ValueError as error:
        raise UsersMistake.of(error, f"{path}: ", hint="the file is JSON") from None


def read_cluster(path: Path) -> Topology:
    """Reads the description of a cluster. One of a single host's links describes no hosts, and is refused."""
    found = read_figures(Topology, path)
    if not found.hosts:
        raise UsersMistake(
            f"{path} describes no hosts",
            hint="add 'hosts' to it, as docs/clusters.md shows; what was measured stands for each",
        )
    return found


MISSING_HINT = "install what is missing into the environment of this command"


def call_target(target: str, *, example: str, returns: str) -> Any:
    """Imports the module of ``module:function``, from the current directory too, and returns what the function returns. Hints have
    an ``example`` of such an argument, and say in words what the function ``returns``.
    """
    module_name, colon, function_name = target.partition(":")
    if not colon or not module_name or not function_name:
        raise UsersMistake(f"{target!r} is not of the form MODULE:FUNCTION", hint=f"for example {example}")
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsersMistake(f"{module_name!r} is a file, not a module", hint=f"write {dotted}:{function_name}")
    function = _find_function(_import(module_name), module_name, function_name, returns)
    with users_code(f"{target}()"):
        made = function()
    if inspect.iscoroutine(made):
        made.close()  # or Python says that nobody awaited it
        raise UsersMistake(
            f"{target} is an async function, which is not awaited here",
            hint=f"name a plain function that returns {returns}",
        )
    return made


def describe(value: object) -> str:
    """A value in words."""
    return "None" if value is None else f"a {type(value).__name__}"


def _import(name: str) -> Any:
    with told("the current folder cannot be found", hint="run the command in a folder that exists"):
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        with users_code(f"importing {name}", is_import=True):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsersMistake(
                f"there is no module {error.name!r}",
                hint="run the command in the folder that holds it, or install its package",
            ) from None
        raise UsersMistake(f"importing {name} failed: {error}", hint=MISSING_HINT) from None


def _find_function(module: Any, module_name: str, name: str, returns: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if function is None:
        own = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name
        ]
        raise UsersMistake(
            f"module {module_name} has no {name!r}", hint=f"its functions are {', '.join(own) or '(none)'}"
        )
    if not callable(function):
        raise UsersMistake(
            f"{module_name}:{name} is {describe(function)}, and cannot be called",
            hint=f"name a function that returns {returns}",
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsersMistake(
            f"{module_name}:{name} needs arguments: {error}", hint="name a function that takes none"
        ) from None
    except ValueError:
        pass  # written in C, without a signature
    return function  # type: ignore[no-any-return]


@contextmanager
def users_code(what: str, *, is_import: bool = False) -> Iterator[None]:
    """Around code of the user's: what it raises is told in one line, with the place.

    A module that an import does not find is left to the import's caller.
    """
    try:
        yield
    except (MissingDependency, UsersMistake):
        raise
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and is_import:
            raise
        name = type(error).__name__
        message, _, hint = str(error).partition("\nhint: ")
        if isinstance(error, crossfade.SessionError) and "initialised already" in message:
            hint = "this command has called crossfade.init() already: leave it to the program's main part"
        if not hint and is_missing:
            hint = MISSING_HINT
        raise UsersMistake(
            f"{what} raised {name}: {message}{_place(error)}",
            hint=hint or "see whether the function works in a Python shell",
        ) from None


def _place(error: BaseException) -> str:
    """Where the user's code was, if it was the user's code that raised."""
    own = Path(crossfade.__file__).parent
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not Path(f.filename).is_relative_to(own) and "importlib" not in f.filename
    ]
    if isinstance(error, SyntaxError) or not frames:
        return ""
    return f"\n  at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}"
