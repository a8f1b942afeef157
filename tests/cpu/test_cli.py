"""The command line, as a user has it: in processes of its own, with its output and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

import crossfade
from crossfade.api import remote
from crossfade.cli.actors import Echo
from crossfade.cli.demo import fold_grid, run_demo
from crossfade.cli.exits import UsersMistake, WrongResult
from crossfade.cli.fan_in import ON_CPU, Burst, FanIn, Measured, measure
from crossfade.cli.measure import alone_us, in_flight_us, p99, show_us
from crossfade.plan.parse import parse_plan
from crossfade.plan.picture import draw_timelines
from crossfade.plan.plan import Plan
from crossfade.plan.timeline import Span, Timeline
from tests.helpers.two_at_a_time import Ran, two_at_a_time

SOURCE = Path(crossfade.__file__).parents[1]
LIMIT_S = 60
QUICK = "import crossfade.cli.demo as demo; demo.NUM_BURSTS = 2; demo.NUM_GLOO_BURSTS = 1; demo.NUM_ROUND_TRIPS = 20"
NO_TORCH = "import sys; sys.modules['torch'] = None"
MAIN = "from crossfade.cli.main import app; app(prog_name='crossfade')"

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
    with crossfade.InputNode() as inp:
        return second.work.bind(first.work.bind(inp).with_tensor_transport(transport))

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


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1", "COLUMNS": "100", "NO_COLOR": "1"}


def crossfade_command(*arguments: str, folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the command; with ``before``, after some Python."""
    how = ["-c", f"{before}\n{MAIN}"] if before else ["-m", "crossfade"]
    return subprocess.run(
        [sys.executable, *how, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def with_graphs(folder: Path) -> Path:
    """The current folder of a command, with a module of graphs."""
    (folder / "graphs.py").write_text(GRAPHS)
    (folder / "no_python.py").write_text("def f(:\n")
    (folder / "needs.py").write_text("import a_package_that_nobody_has\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_graphs(tmp_path)


@pytest.fixture
def inline() -> Iterator[None]:
    crossfade.init(engine="inline")
    yield
    crossfade.shutdown()


def test_version(tmp_path: Path) -> None:
    done = crossfade_command("--version", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"crossfade {crossfade.__version__}\n", "")


# crossfade plan


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
    (
        ["needs:chain"],
        "importing needs failed: No module named 'a_package_that_nobody_has'",
        "install what is missing",
    ),
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
        done = subprocess.run(
            [sys.executable, "-m", "crossfade", *arguments],
            cwd=folder,
            env={**environment(), "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*No space left on device.*\nhint: .*\n", done.stderr)


@pytest.mark.parametrize("name", ["timeline.svg", "overlap.svg", "predicted.json", "measured.json", "plan.txt"])
def test_demo_says_at_once_what_it_cannot_write(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsersMistake, match=rf"cannot write .*{name}: Is a directory\nhint: "):
        run_demo(tmp_path, "inline")
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_an_error_in_the_users_function_is_shown_with_its_place(folder: Path) -> None:
    line = GRAPHS.splitlines().index('    return {}["missing"]') + 1
    done = crossfade_command("plan", "graphs:raises", folder=folder)
    assert f'graphs.py, line {line}: return {{}}["missing"]' in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "graphs:chain", "--max-inflight", "0"],
        ["plan"],
        ["bench", "hops", "--num", "1"],
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


# crossfade demo


def test_demo_without_torch(tmp_path: Path) -> None:
    done = crossfade_command("demo", "--output", "out/new", folder=tmp_path, before=f"{NO_TORCH}\n{QUICK}")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing is copied" in done.stdout
    assert "(0 arrays were copied out)" in done.stdout
    assert "pip install 'crossfade[torch]'" in done.stdout
    files = tmp_path / "out" / "new"
    assert sorted(path.name for path in files.iterdir()) == [
        "measured.json",
        "plan.txt",
        "predicted.json",
        "timeline.svg",
    ]
    plan = parse_plan((files / "plan.txt").read_text())
    for name in ("measured", "predicted"):
        events = json.loads((files / f"{name}.json").read_text())["traceEvents"]
        assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == set(plan.programs)
        runs = [
            event for event in events if event.get("cat") == "compute" and event["args"]["action"].startswith("run ")
        ]
        assert len(runs) == 6 * len(plan.nodes)
    assert "predicted: " in (files / "timeline.svg").read_text()
    shares = dict(re.findall(r"│ (\w+) +│ +([0-9.]+)% │", done.stdout))
    assert set(shares) == set(plan.programs)
    assert float(shares["Receiver"]) > float(shares["Sender0"])


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_demo_with_torch_shows_what_overlap_gains(tmp_path: Path) -> None:
    done = crossfade_command("demo", folder=tmp_path, before=QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"With overlap an execution takes \d+% (less|more) time", done.stdout)
    hidden = dict(re.findall(r"│ (\w+ overlap) +│ +[0-9.]+ │ +[0-9.]+% │ +([0-9.]+)% │", done.stdout))
    assert float(hidden["with overlap"]) > float(hidden["without overlap"]) == 0.0
    ElementTree.parse(tmp_path / "demo-output" / "overlap.svg")


def test_demo_on_the_inline_engine(tmp_path: Path) -> None:
    done = crossfade_command("demo", "--engine", "inline", folder=tmp_path, before=QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert "engine inline" in done.stdout


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_the_demos_program_on_gpus_is_right_also_on_the_cpu(inline: None) -> None:
    from crossfade.cli import gpu_actors

    size = 64
    parts = replace(
        gpu_actors.on_gpus(4),
        sender_args=(size, "cpu"),
        receiver_args=(size, "cpu"),
        num_gpus=0,
        expected=lambda number, execution: gpu_actors.expected(number, execution, size),
    )
    assert (parts.num_senders, gpu_actors.on_gpus(2).num_senders) == (3, 1)
    program = FanIn(parts)
    with program.compile() as graph:
        (measured,) = measure(program, [graph], 1)  # raises if a result is wrong
    assert len(measured.bursts) == 1


def test_what_an_action_took_on_a_gpu_counts_before_what_its_host_took(inline: None) -> None:
    plan = FanIn().compile().plan
    spans = [
        Span("Sender0", stream, label, "make", kind, 0, 10.0, 10.0 + duration_us)
        for stream, label, kind, duration_us in (
            ("main", "run n0", "compute", 20.0),
            ("compute", "run n0", "compute", 500.0),
            ("main", "write n0", "communicate", 9.0),
            ("main", "write n0", "wait", 70.0),
        )
    ]
    measured = Measured(ON_CPU, plan, (Burst(Timeline.of("measured", spans), (600.0,)),))
    assert measured.took_us("run n0") == [500.0]
    assert measured.durations_us("run n0") == [20.0]
    assert measured.took_us("write n0") == [9.0]


def test_a_wrong_result_gives_exit_code_1(tmp_path: Path) -> None:
    lie = "import crossfade.cli.fan_in as fan_in; fan_in.FanIn.expected = lambda self, execution: [1, 2, 3]"
    done = crossfade_command("demo", folder=tmp_path, before=f"{NO_TORCH}\n{QUICK}\n{lie}")
    assert done.returncode == 1
    assert re.match(
        r"error: the result of execution 0 is \[\d+, \d+, \d+\], and should be \[1, 2, 3\]\nhint: ", done.stderr
    )
    assert "Traceback" not in done.stderr


def test_the_grid_is_folded_and_loses_nothing(inline: None) -> None:
    plan: Plan = FanIn().compile().plan
    whole = fold_grid(plan, 10_000)
    assert whole.splitlines() == str(plan).splitlines()[-len(plan.programs) :]
    for width in (40, 80, 120):
        folded = fold_grid(plan, width)
        assert max(map(len, folded.splitlines())) <= width
        for name, actions in plan.programs.items():
            rows = [line for line in folded.splitlines() if line.split(" ")[0] == name]
            cells = [cell.strip() for row in rows for cell in row.split(" | ")[1:]]
            assert [cell for cell in cells if cell] == [str(action) for action in actions]


def test_bursts_start_at_zero_and_count_their_own_executions(inline: None) -> None:
    program = FanIn()
    with program.compile() as graph:
        (measured,) = measure(program, [graph], 2)
    assert len(measured.bursts) == 2
    for burst in measured.bursts:
        assert min(span.start_us for span in burst.timeline.spans) == 0
        runs = [(span.execution, span.label) for span in burst.timeline.spans if span.label.startswith("run ")]
        assert sorted(runs) == [(execution, f"run n{n}") for execution in range(6) for n in range(6)]
    for shares in measured.shares().values():
        assert 0 <= shares.compute + shares.exposed <= 1 + 1e-9
    predicted = measured.predicted()
    assert predicted.makespan_us >= 6 * 3 * 0.9 * min(measured.durations_us("run n3"))


def spans_of(*places: tuple[str, int, float, float]) -> Timeline:
    """Spans (kind, execution, start, end) of one actor, all on its main stream."""
    return Timeline.of("made", [Span("A", "main", "run n0", "A.f", *place) for place in places])


def test_in_pictures_waiting_lies_behind_what_the_stream_does_meanwhile() -> None:
    svg = draw_timelines([spans_of(("wait", 0, 0, 100), ("communicate", 0, 20, 80))])
    names = [text.text for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
    assert "A" in names
    assert "A main 2" not in names
    assert svg.index('<rect class="wait"', svg.index(">A<")) < svg.index('<rect class="communicate"', svg.index(">A<"))


def test_in_pictures_a_wide_bar_keeps_its_name_and_executions_differ_in_shade() -> None:
    svg = draw_timelines([spans_of(("compute", 0, 0, 500), ("compute", 0, 500, 500.01), ("compute", 1, 510, 1000))])
    root = ElementTree.fromstring(svg)
    labels = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if "#" in (text.text or "")]
    assert labels == ["run n0 A.f #0", "run n0 A.f #1"]
    bars = [bar for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("class") == "compute" and len(bar)]
    assert len({bar.get("fill") for bar in bars}) == len(bars) == 2


# crossfade bench hops


def test_bench_hops(tmp_path: Path) -> None:
    done = crossfade_command("bench", "hops", "--num", "20", "--spin-us", "0", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = re.findall(r"│ (\S.*?) +│ +(\d+) │ +([0-9.,]+) │ +([0-9.,]+) │", done.stdout)
    assert len(rows) == 7
    for _, num, median_us, p99_us in rows:
        assert int(num) in (10, 20)
        assert 0 < float(median_us.replace(",", "")) <= float(p99_us.replace(",", ""))
    assert re.search(r"8 in flight through one actor: [0-9,]+ executions a second", done.stdout)


def test_figures() -> None:
    assert p99([*range(100)]) == 99
    assert p99([*range(1000)]) == 990
    assert p99([7.0]) == 7.0
    assert [show_us(time_us) for time_us in (1.234, 12.34, 123.4, 12345.6)] == ["1.23", "12.3", "123", "12,346"]


def test_results_are_looked_at_and_come_in_order(inline: None) -> None:
    with crossfade.InputNode() as value:
        node = remote(Echo).remote().echo.bind(value)
    with node.compile() as graph:
        assert len(alone_us(graph, [1, 2, 3], int.__eq__)) == 3
        times_us, results = in_flight_us(graph, [*range(7)], 3)
        assert results == [*range(7)]
        assert sorted(times_us) == times_us
        with pytest.raises(WrongResult, match="the result for 2 is 2"):
            alone_us(graph, [1, 2], lambda sent, got: got == 1)


# Ctrl-C


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
    command = [sys.executable, "-m", "crossfade", "plan", "interrupted:chain"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, timeout=LIMIT_S, check=False)
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
    process = subprocess.Popen(
        [sys.executable, "-m", "crossfade", *arguments],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
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
