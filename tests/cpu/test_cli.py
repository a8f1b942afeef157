"""The command line, as a user has it: ``crossfade plan`` in processes of its own, with its output and its exit codes; mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest

import crossfade
from crossfade.plan.parse import parse_plan
from tests.helpers.builds import BUILD
from tests.helpers.command_line import LIMIT_S, crossfade_command, environment
from tests.helpers.programs import python, started
from tests.helpers.two_at_a_time import Ran, two_at_a_time

GRAPHS = """
import os
import crossfade

@crossfade.remote
class Worker:
    def __init__(self, is_broken=False):
        print("constructed in", os.getpid())
        if is_broken:
            raise OSError("no such disk")

    def work(self, value):
        return value

def chain(transport="auto"):
    print("called in", os.getpid())
    first, second = Worker.remote(), Worker.remote()
    return second.work.bind(first.work.bind(crossfade.InputNode()).with_tensor_transport(transport))

def gloo():
    return chain("gloo")

def parts():
    worker = Worker.remote()
    with crossfade.InputNode() as inp:
        return crossfade.MultiOutputNode([worker.work.bind(inp[0]), worker.work.bind(inp[1])])

def copied():
    from crossfade.collective import allgather

    workers = [Worker.remote() for _ in range(2)]
    with crossfade.InputNode() as inp:
        made = [worker.work.bind(inp) for worker in workers]
        return crossfade.MultiOutputNode(allgather.bind(made, transport="copy"))

def nothing():
    pass

def a_list():
    return [chain()]

def compiled():
    return chain().compile()

async def waits():
    return chain()

def raises():
    return {}["missing"]

def lazy():
    import a_package_that_nobody_has

def exits():
    raise SystemExit("enough")

def initialises():
    crossfade.init()

def takes(size):
    pass

def wrong_method():
    return Worker.remote().wrok.bind(1)

def wrong_transport():
    return chain("pigeon")

def broken_actor():
    return Worker.remote(True).work.bind(1)

number = 3
"""


def with_graphs(folder: Path) -> Path:
    """The current folder of a command, with a module of graphs."""
    (folder / "graphs.py").write_text(GRAPHS)
    (folder / "no_python.py").write_text("def f(:\n")
    (folder / "needs.py").write_text("import a_package_that_nobody_has\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_graphs(tmp_path)


def test_version(tmp_path: Path) -> None:
    done = crossfade_command("--version", folder=tmp_path, imported=())
    assert (done.returncode, done.stdout, done.stderr) == (0, f"crossfade {crossfade.__version__} ({BUILD})\n", "")


@pytest.mark.parametrize("target", ["graphs:chain", "graphs:parts"])
def test_plan_prints_a_plan_that_parses_and_starts_no_process(folder: Path, target: str) -> None:
    done = crossfade_command("plan", target, "--max-inflight", "3", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    text, _, facts = done.stdout[done.stdout.index("plan ") :].partition("\n\n")
    plan = parse_plan(text)
    assert plan.max_inflight == 3
    assert len(plan.nodes) == 2
    assert {channel.depth for channel in plan.channels} == {3}
    assert f"rings take at least {3 * 1024 * len(plan.channels):,} bytes" in facts
    assert float(re.findall(r"predicted: ([0-9.]+) us", facts)[0]) > 0
    assert len(set(re.findall(r"(?:called|constructed) in (\d+)", done.stdout))) == 1


def test_json_is_all_that_is_on_stdout(folder: Path) -> None:
    done = crossfade_command("plan", "graphs:chain", "--json", folder=folder)
    assert json.loads(done.stdout)["num_actors"] == 2
    assert re.findall(r"^(called|constructed) in", done.stderr, re.MULTILINE) == [
        "called",
        "constructed",
        "constructed",
    ]


def test_plan_overlaps_unless_told_not_to(folder: Path) -> None:
    plans = [
        crossfade_command("plan", "graphs:gloo", *more, folder=folder).stdout
        for more in ([], ["--overlap"], ["--no-overlap"])
    ]
    assert ["@recv +1" in plan for plan in plans] == [True, True, False]


def test_plan_says_what_its_prediction_had_no_measurements_of(folder: Path) -> None:
    pytest.importorskip("torch")
    done = crossfade_command("plan", "graphs:copied", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: allgather (collective c0): not all of its actors have GPUs, and it is reckoned with as if by gloo"
    ]


def test_plan_draws_the_predicted_timeline(folder: Path) -> None:
    done = crossfade_command("plan", "graphs:chain", "--svg", "x.svg", folder=folder)
    assert done.returncode == 0
    texts = {
        "".join(each.itertext())
        for each in ElementTree.parse(folder / "x.svg").iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"driver", "Worker0", "Worker1"} <= texts


MISTAKES: list[tuple[list[str], str, str]] = [
    (["graphs"], "'graphs' is not of the form MODULE:FUNCTION", "my_package.my_module:make_graph"),
    (["graphs.py:chain"], "'graphs.py' is a file", "write graphs:chain"),
    (["nowhere:chain"], "no module 'nowhere'", "the folder that holds it"),
    (["needs:chain"], "importing needs failed: No module named 'a_package_that_nobody_has'", "install what is missing"),
    (["no_python:f"], "importing no_python raised SyntaxError", "hint:"),
    (["graphs:chian"], "module graphs has no 'chian'", "chain, gloo, parts"),
    (["graphs:number"], "graphs:number is a int, and cannot be called", "a function that returns a node"),
    (["graphs:takes"], "needs arguments: missing a required argument: 'size'", "takes none"),
    (["graphs:nothing"], "returned None, which is no node", "bind"),
    (["graphs:a_list"], "returned a list", "MultiOutputNode"),
    (["graphs:compiled"], "returned a CompiledGraph", "before .compile()"),
    (["graphs:waits"], "graphs:waits is an async function", "a plain function"),
    (["graphs:raises"], "raised KeyError: 'missing'", "hint:"),
    (
        ["graphs:lazy"],
        "raised ModuleNotFoundError: No module named 'a_package_that_nobody_has'",
        "install what is missing",
    ),
    (["graphs:exits"], "raised SystemExit: enough", "hint:"),
    (
        ["graphs:initialises"],
        "raised SessionError: crossfade is initialised already",
        "leave it to the program's main part",
    ),
    (["graphs:wrong_method"], "has no method 'wrok'", "did you mean 'work'?"),
    (["graphs:wrong_transport"], "pigeon", "hint:"),
    (["graphs:broken_actor"], "raised OSError: no such disk\nhint: ", "constructors"),
    (["graphs:chain", "--svg", "x.png"], "the picture is an SVG, not what x.png is named for", "ends in .svg"),
    (
        ["graphs:chain", "--svg", "none/x.svg"],
        "cannot write none/x.svg: No such file or directory",
        "folder that exists",
    ),
]
"""Arguments of ``crossfade plan``, and what the message and the hint say."""


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    folder = with_graphs(tmp_path_factory.mktemp("graphs"))
    with two_at_a_time(
        {" ".join(each): partial(crossfade_command, "plan", *each, folder=folder) for each, _, _ in MISTAKES}
    ) as ran:
        yield ran


@pytest.mark.parametrize(("arguments", "says", "hint"), MISTAKES, ids=[" ".join(each) for each, _, _ in MISTAKES])
def test_a_mistake_gives_one_message_and_exit_code_2(mistakes: Ran, arguments: list[str], says: str, hint: str) -> None:
    done = mistakes[" ".join(arguments)].result()
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hint: ")
    assert hint in last


def test_a_current_folder_that_is_gone_is_a_mistake(folder: Path) -> None:
    gone = folder / "gone"
    gone.mkdir()
    done = crossfade_command("plan", "graphs:chain", folder=gone, before="import os; os.rmdir(os.getcwd())")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the current folder cannot be found: No such file or directory\nhint: ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "unbuffered"), [(("plan", "graphs:chain"), ""), (("demo", "--engine", "inline"), "1")]
)
def test_output_that_finds_no_room_gives_one_message_and_exit_code_1(
    folder: Path, arguments: tuple[str, ...], unbuffered: str
) -> None:
    with open("/dev/full", "w") as full:
        streams = {"stdout": full, "stderr": subprocess.PIPE, "capture_output": False}
        variables = environment(PYTHONUNBUFFERED=unbuffered)
        done = python("-m", "crossfade", *arguments, cwd=folder, env=variables, timeout_s=LIMIT_S, **streams)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*No space left on device.*\nhint: .*\n", done.stderr)


def test_an_error_in_the_users_function_is_shown_with_its_place(folder: Path) -> None:
    line = GRAPHS.splitlines().index('    return {}["missing"]') + 1
    done = crossfade_command("plan", "graphs:raises", folder=folder)
    assert f'graphs.py, line {line}: return {{}}["missing"]' in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "graphs:chain", "--max-inflight", "0"],
        ["plan", "graphs:chain", "--max-inflight", "65537"],
        ["plan"],
        ["bench", "hops", "--num", "1"],
        ["bench", "hops", "--spin-us", "1e400"],
        ["demo", "--engine", "steam"],
        ["demo", "--output", "graphs.py"],
        ["fly"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_give_exit_code_2(folder: Path, arguments: list[str]) -> None:
    done = crossfade_command(*arguments, folder=folder)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def processes_of_session(session: int) -> list[str]:
    """The processes of a session, without those that have ended and only await their parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, sid = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(sid) == session and state != "Z":
                found.append(f"{entry.name} {state}")
    return found


def test_ctrl_c_inside_an_exec_of_text_exits_130(tmp_path: Path) -> None:
    """`python -m` ends itself by SIGINT where such an interrupt was the last thing that an exec saw."""
    (tmp_path / "interrupted.py").write_text("def chain():\n    exec('raise KeyboardInterrupt')\n")
    done = crossfade_command("plan", "interrupted:chain", folder=tmp_path, imported=())
    assert done.returncode == 130, done.stderr


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        (["demo"], "Actors started"),
        (["demo"], "crossfade "),
        (["bench", "hops", "--num", "1000000"], "crossfade "),
        (["plan", "endless:chain"], "waiting"),
    ],
)
def test_ctrl_c_exits_130_and_leaves_no_process(tmp_path: Path, arguments: list[str], when: str) -> None:
    (tmp_path / "endless.py").write_text("def chain():\n    print('waiting')\n    while True:\n        pass\n")
    process = started("-m", "crossfade", *arguments, cwd=tmp_path, env=environment(), start_new_session=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith(when) for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, errors
        assert errors == ""
        assert processes_of_session(process.pid) == []
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
