"""Choices on disk: what is kept and found, what is ignored, and what is left by processes that are killed or write at once."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from crossfade.ops.calls.job import Shape
from crossfade.ops.choice import cache as module
from crossfade.ops.choice.cache import Cache, Decision, Source, versions
from crossfade.ops.choice.candidate import PLAIN, Candidate
from crossfade.topology import topology_path
from tests.helpers.tuning import SHAPE, rows

pytestmark = pytest.mark.timeout(60)

SOURCE = Path(module.__file__).parents[3]
ROUNDS = Candidate("rounds", (("rounds", 2),))
DECISION = Decision((ROUNDS, PLAIN), Source.MEASURED, ((ROUNDS, 1400.5), (PLAIN, 1640.0)))
OTHER = Decision((PLAIN,), Source.MEASURED, ((PLAIN, 99.0),))


def make(folder: Path, own: str = "v1") -> Cache:
    return Cache("NVIDIA H200", 4, own, folder)


def use(cache: Cache) -> None:
    """Finds nothing, and keeps something."""
    assert cache.load(SHAPE) is None
    assert cache.load(SHAPE) is None
    cache.keep(SHAPE, DECISION)


def keep_two(cache: Cache) -> None:
    cache.keep(SHAPE, DECISION)
    cache.keep(SHAPE, OTHER)


def test_what_is_kept_is_found_for_the_whole_bucket_by_another_one(tmp_path: Path) -> None:
    kept = make(tmp_path / "deep" / "folder")
    assert kept.load(SHAPE) is None
    kept.keep(SHAPE, DECISION)
    found = make(tmp_path / "deep" / "folder")
    assert found.load(SHAPE) == DECISION
    assert found.load(rows(6145)) == DECISION
    assert found.load(rows(6144)) is None
    kept.keep(rows(7000), OTHER)
    assert found.load(SHAPE) == OTHER
    assert sorted(path.name for path in (tmp_path / "deep" / "folder").iterdir()) == [
        "choices1-NVIDIA-H200-x4-matmul_reduce_scatter.json",
        "choices1-NVIDIA-H200-x4-matmul_reduce_scatter.json.lock",
    ]


def test_each_kind_of_thing_has_its_own_choice(tmp_path: Path) -> None:
    make(tmp_path).keep(SHAPE, DECISION)
    differing = [
        ("all_gather_matmul", 8192, 8192, 7168, "bfloat16", "nt", 4),
        ("matmul_reduce_scatter", 8192, 8192, 7168, "float16", "nt", 4),
        ("matmul_reduce_scatter", 8192, 8192, 7168, "bfloat16", "nn", 4),
        ("matmul_reduce_scatter", 8192, 8191, 7168, "bfloat16", "nt", 4),
        ("matmul_reduce_scatter", 8192, 8192, 7167, "bfloat16", "nt", 4),
    ]
    for each in differing:
        assert make(tmp_path).load(Shape(*each)) is None
    assert make(tmp_path, "v2").load(SHAPE) is None
    assert Cache("NVIDIA H100", 4, "v1", tmp_path).load(SHAPE) is None
    assert Cache("NVIDIA H200", 8, "v1", tmp_path).load(SHAPE) is None
    make(tmp_path, "v2").keep(SHAPE, OTHER)  # and leaves that of the other version
    assert (make(tmp_path).load(SHAPE), make(tmp_path, "v2").load(SHAPE)) == (DECISION, OTHER)


def test_devices_with_similar_names_do_not_take_each_other_s_choices(tmp_path: Path) -> None:
    Cache("a b", 4, "v1", tmp_path).keep(SHAPE, DECISION)
    with pytest.warns(RuntimeWarning, match="no file of choices for this device"):
        assert Cache("a/b", 4, "v1", tmp_path).load(SHAPE) is None
    assert Cache("../..", 4, "v1", tmp_path).path("x").parent == tmp_path


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"[" * 100_000,
        b'{"format": 1}',
        b'{"format": 2, "device": "NVIDIA H200", "num_ranks": 4, "operator": "matmul_reduce_scatter", "choices": {}}',
        b'{"format": 1, "device": "NVIDIA H200", "num_ranks": 4, "operator": "matmul_reduce_scatter", "choices": []}',
    ],
)
def test_a_damaged_or_foreign_file_is_warned_of_once_and_replaced(tmp_path: Path, content: bytes) -> None:
    cache = make(tmp_path)
    cache.path(SHAPE.operator).write_bytes(content)
    with pytest.warns(RuntimeWarning, match="it is ignored, and replaced at the next choice") as caught:
        use(cache)
    assert len(caught) == 1
    assert cache.load(SHAPE) == DECISION


@pytest.mark.parametrize(
    "entry",
    [
        None,
        3,
        {},
        {"order": [], "source": "measured", "times_us": {}},
        {"order": "plain", "source": "measured", "times_us": {}},
        {"order": ["Plain"], "source": "measured", "times_us": {}},
        {"order": ["plain"], "source": "guessed", "times_us": {}},
        {"order": ["plain"], "source": "measured", "times_us": {"plain": -1}},
        {"order": ["plain"], "source": "measured", "times_us": {"plain": float("nan")}},
        {"order": ["plain"], "source": "measured", "times_us": {"plain": 10**400}},
        {"order": ["plain"], "source": "measured", "times_us": [1]},
    ],
)
def test_a_damaged_choice_is_ignored_and_the_others_are_not(tmp_path: Path, entry: object) -> None:
    cache = make(tmp_path)
    cache.keep(SHAPE, DECISION)
    cache.keep(rows(1024), OTHER)
    path = cache.path(SHAPE.operator)
    data = json.loads(path.read_text())
    key = next(key for key in data["choices"] if key.startswith("8192"))
    data["choices"][key] = entry
    path.write_text(json.dumps(data))
    if entry is None:
        assert cache.load(SHAPE) is None
    else:
        with pytest.warns(RuntimeWarning, match="is ignored: "):
            assert cache.load(SHAPE) is None
    assert cache.load(rows(1024)) == OTHER


def test_a_folder_that_cannot_be_written_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = make(tmp_path / "file" / "folder")  # root may write anywhere, but not below a file
    with pytest.warns(RuntimeWarning, match="choices cannot be kept in .*set CROSSFADE_CACHE_DIR") as caught:
        keep_two(cache)
    assert len(caught) == 1
    with pytest.warns(RuntimeWarning, match="cannot be read: Not a directory"):
        assert cache.load(SHAPE) is None


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(tmp_path)
    cache.keep(SHAPE, DECISION)

    def fsync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        cache.keep(SHAPE, OTHER)
    assert cache.load(SHAPE) == DECISION


def test_an_unreadable_file_is_not_replaced(tmp_path: Path) -> None:
    cache = make(tmp_path)
    cache.path(SHAPE.operator).mkdir()
    with pytest.warns(RuntimeWarning, match="Is a directory"):
        cache.keep(SHAPE, DECISION)
    with pytest.warns(RuntimeWarning, match="cannot be read: Is a directory"):
        assert cache.load(SHAPE) is None


def test_a_lock_that_somebody_keeps_does_not_stop_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCK_S", 0.02)
    cache = make(tmp_path)
    with open(f"{cache.path(SHAPE.operator)}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(RuntimeWarning, match=r"another process has held .*\.lock for 0\.02 s"):
            cache.keep(SHAPE, DECISION)
    assert cache.load(SHAPE) is None
    cache.keep(SHAPE, DECISION)
    assert cache.load(SHAPE) == DECISION


def test_the_folder_is_the_user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def folder() -> Path:
        return Cache("d", 2, "v").path("o").parent

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CROSSFADE_CACHE_DIR", raising=False)
    assert folder() == tmp_path / ".cache" / "crossfade"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert folder() == tmp_path / "x" / "crossfade"
    monkeypatch.setenv("CROSSFADE_CACHE_DIR", str(tmp_path / "own"))
    assert folder() == topology_path().parent == tmp_path / "own"


def test_without_a_home_there_is_a_warning(no_home: None) -> None:
    cache = Cache("d", 4, "v")
    with pytest.warns(RuntimeWarning, match="cannot be kept: Could not determine home directory.; set") as caught:
        use(cache)
    assert len(caught) == 1


def test_versions_name_what_a_choice_depends_on() -> None:
    names = [part.split()[0] for part in versions().split(", ")]
    assert names == ["crossfade", "torch", "triton", "driver"]
    assert not versions().startswith("crossfade -")


def test_times_of_products_are_kept_beside_the_choices(tmp_path: Path) -> None:
    waves = ((1024, 14.5), (2048, 27.0))
    assert make(tmp_path).load_waves() is None
    make(tmp_path).keep_waves(waves)
    assert make(tmp_path).load_waves() == waves
    assert make(tmp_path, "v2").load_waves() is None


@pytest.mark.parametrize(
    "entry", [3, [], [1, 2], [[1, -1.0]], [[2, 1.0], [1, 1.0]], {"a": 1}, [["x", 1]], [[1e400, 1]]]
)
def test_damaged_times_of_products_are_ignored(tmp_path: Path, entry: Any) -> None:
    cache = make(tmp_path)
    cache.keep_waves(entry)
    with pytest.warns(RuntimeWarning, match=r"the times in .*products\.json are ignored: "):
        assert cache.load_waves() is None


# Processes

BEGIN = f"""
import os, signal, sys
sys.path.insert(0, {str(SOURCE)!r})
from pathlib import Path
from crossfade.ops.choice import cache as module
from crossfade.ops.choice.candidate import PLAIN, Candidate
from crossfade.ops.choice.cache import Decision, Source
from crossfade.ops.calls.job import Shape

def shape(number):
    return Shape("matmul_all_reduce", 4, number, 1, "bfloat16", "nt", 4)

def decision(number):
    return Decision((PLAIN,), Source.MEASURED, ((PLAIN, 1.0 + number),))

cache = module.Cache("device", 4, "v1", Path(sys.argv[1]))
"""

EVERY_LINE = """
class File:
    '''Of the new file, so that half of the text can be in it.'''
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *args): self.file.close()
    def write(self, text):
        for part in (text[:len(text) // 2], text[len(text) // 2:]):
            self.file.write(part)
            self.file.flush()
            step(None, "line", None)
    def flush(self): self.file.flush()
    def fileno(self): return self.file.fileno()

def step(frame, event, arg):
    global left
    if event == "line":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return step

def trace(frame, event, arg):
    return step if frame.f_code.co_filename == module.__file__ else None

cache.keep(shape(0), decision(0))
number, results = 0, []
while True:
    number += 1
    pid = os.fork()
    if not pid:
        left, real = number, open
        module.open = lambda path, mode="r", **kinds: File(real(path, mode, **kinds))
        sys.settrace(trace)
        cache.keep(shape(number), decision(number))
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    found = [each for each in range(number + 1) if cache.load(shape(each)) == decision(each)]
    results.append(number in found)
    assert set(range(number)) - {each + 1 for each, is_there in enumerate(results) if not is_there} <= {*found}, (number, found)
    if not os.WIFSIGNALED(status):
        assert status == 0
        break
print(number, results.count(True))
"""


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", BEGIN + code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_kill_at_any_line_leaves_a_whole_file_with_all_that_was_in_it(tmp_path: Path) -> None:
    """A fork for each line of the cache's code, and for each half of the text, dies there by SIGKILL. A warning is an error."""
    process = run_python(EVERY_LINE, str(tmp_path))
    out, errors = process.communicate(timeout=50)
    assert process.returncode == 0, errors
    num_kills, num_kept = map(int, out.split())
    assert num_kills > 20
    assert 1 < num_kept < num_kills  # killed behind the rename, or not at all


MANY = """
for number in range(40):
    cache.keep(shape(int(sys.argv[2]) + number), decision(number))
    assert cache.load(shape(int(sys.argv[2]) + number)) == decision(number)
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    writers = [run_python(MANY, str(tmp_path), str(1000 * each)) for each in range(3)]
    for writer in writers:
        _, errors = writer.communicate(timeout=50)
        assert writer.returncode == 0, errors
    cache = Cache("device", 4, "v1", tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(40):
            for each in range(3):
                shape = Shape("matmul_all_reduce", 4, 1000 * each + number, 1, "bfloat16", "nt", 4)
                assert cache.load(shape) == Decision((PLAIN,), Source.MEASURED, ((PLAIN, 1.0 + number),))
