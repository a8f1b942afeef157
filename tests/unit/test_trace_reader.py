"""Trace files: whole, in pieces, damaged, of other tools."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from crossfade.errors import TraceError
from crossfade.profile.doctor.diagnosis import diagnose
from crossfade.profile.traces import chrome
from crossfade.profile.traces.reader import read_trace, read_traces
from tests.helpers.gpu_traces import Machine, Rank


def program(rank: Rank) -> None:
    for _ in range(3):
        rank.kernel(50)
        rank.all_reduce(40, 1024)()
        rank.item()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Machine(program).save(tmp_path)[0]


def test_what_is_read(path: Path) -> None:
    trace = read_trace(path)
    assert (trace.rank, trace.world_size, trace.num_sms, trace.gpu) == (0, 1, 132, "NVIDIA H200")
    assert [activity.name for activity in trace.activities[:2]] == ["gemm", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]
    message = trace.activities[1].message
    assert (message.collective, message.num_in, message.group, message.dtype) == ("allreduce", 1024, "0", "BFloat16")
    assert len(trace.collectives) == 6


@pytest.mark.parametrize("indent", [None, 1])
def test_a_file_in_pieces_is_the_whole_file(path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None) -> None:
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"]:
        event["args"]["odd"] = [{"a": "}, {"}, {"b": 1}, {}]  # what looks like the end of an event, and is none
    trace["traceName"] = "after the events"
    path.write_text(json.dumps(trace, indent=indent))
    whole = read_trace(path)
    for num_bytes in (700, 1001, 5000):
        monkeypatch.setattr(chrome, "_PIECE_BYTES", num_bytes)
        pieces = read_trace(path)
        assert [a.name for a in pieces.activities] == [a.name for a in whole.activities]
        assert [c.start_us for c in pieces.calls] == [c.start_us for c in whole.calls]
        assert pieces.metadata["traceName"] == "after the events"


def test_compressed_and_bare_lists_are_read_too(path: Path, tmp_path: Path) -> None:
    num = len(read_trace(path).activities)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert len(read_trace(packed).activities) == num
    path.write_text(json.dumps(json.loads(path.read_text())["traceEvents"]))
    assert len(read_trace(path).activities) == num


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_truncated_file_says_so(path: Path, share: float, *, is_packed: bool) -> None:
    data = gzip.compress(path.read_bytes()) if is_packed else path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(
        TraceError, match=r"(?s)rank0.json (ends|is damaged or truncated).*hint: a program that was killed"
    ):
        read_trace(path)


def test_a_damaged_file_says_so(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"\x00" * 40
    path.write_bytes(data)
    with pytest.raises(TraceError, match="damaged"):
        read_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"not a trace", "is not JSON"),
        (b'{"nodes": []}', 'has no "traceEvents"'),
        (b'{"traceEvents": []}', "has no events of torch.profiler"),
        (b'{"traceEvents": [{"ph": "X", "name": "TF op", "ts": 1, "dur": 2}]}', "has no events of torch.profiler"),
        (b'[[1, 2], "allocated by category"]', "is a list of lists, not of events"),
        (b"\x1f\x8bnot really gzip", "ends in the middle of its compressed data"),
    ],
)
def test_what_is_no_trace_says_so(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (b"config.py(0): \xff\xfe", "config.py(0): \ufffd\ufffd"),
        (b"|||S(1): \x01<module>\n", "|||S(1):  <module> "),
        (rb"C:\users\q.py(3): f \\ \u0041", "C:\\users\\q.py(3): f \\ A"),
    ],
)
@pytest.mark.parametrize("value", [b"inf", b"-nan", b"N/A", b"Infinity"])
def test_what_torch_writes_and_is_no_json_is_read(path: Path, name: bytes, read: str, value: bytes) -> None:
    num = len(read_trace(path).activities)
    text = path.read_bytes().replace(b'"correlation":', b'"memory bandwidth (GB/s)": ' + value + b', "correlation":')
    path.write_bytes(text.replace(b'"gemm"', b'"' + name + b'"'))
    trace = read_trace(path)
    assert (len(trace.activities), trace.notes) == (num, [])
    assert trace.activities[0].name == read


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="hint: see that the file is there"):
        read_trace(tmp_path / "none.json")


def test_traces_of_other_machines_say_so(path: Path) -> None:
    events = json.loads(path.read_text())["traceEvents"]
    on_host = [event for event in events if event["cat"] in ("cpu_op", "user_annotation")]
    path.write_text(json.dumps({"traceEvents": on_host}))
    with pytest.raises(TraceError, match="a trace of the CPU alone"):
        read_trace(path)
    amd = [{**event, "name": "hip" + event["name"]} for event in events if event["cat"].startswith("cuda")]
    path.write_text(json.dumps({"traceEvents": amd}))
    with pytest.raises(TraceError, match="AMD GPUs"):
        read_trace(path)


def test_two_files_of_one_rank_are_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(path.read_bytes())
    with pytest.raises(TraceError, match=r"both of rank 0\nhint: "):
        read_traces([path, other])


def test_a_file_that_is_given_twice_is_refused(path: Path, tmp_path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text())["traceEvents"]))
    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(TraceError, match=r"rank0.json is given 2 times\nhint: "):
        read_traces([path, tmp_path / "link.json"])


def test_files_of_different_numbers_of_ranks_are_refused(path: Path, tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    other = Machine(program, 2).save(tmp_path / "two")[1]
    with pytest.raises(TraceError, match=r"different numbers of ranks: rank0.json of 1, rank1.json of 2\nhint: "):
        read_traces([path, other])


def test_a_file_that_does_not_say_its_rank_gets_one_that_is_left(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(path.read_text())["traceEvents"]))
    assert [trace.label for trace in read_traces([other, path])] == ["rank 0", "rank 1"]
    assert [trace.world_size for trace in read_traces([other, path])] == [1, None], "the one that says it is rank 0 is"


def test_events_that_cannot_be_read_are_counted(path: Path) -> None:
    trace = json.loads(path.read_text())
    for event in trace["traceEvents"][:2]:
        event["args"] = {"correlation": ["odd"]}
    next(event for event in trace["traceEvents"] if event["cat"] == "cpu_op")["name"] = None
    path.write_text(json.dumps(trace))
    (read,) = read_traces([path])
    assert read.notes == ["3 events could not be read"]
    diagnose([read])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("distributedInfo", [1]),
        ("distributedInfo", 3),
        ("distributedInfo", {"rank": "first"}),
        ("deviceProperties", {"0": {}}),
        ("deviceProperties", [{"numSms": "x"}]),
        ("deviceProperties", [1]),
        ("baseTimeNanoseconds", "x"),
    ],
)
def test_metadata_of_another_shape_is_left_out_with_a_note(path: Path, name: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    (trace,) = read_traces([path])
    assert [note.partition(": ")[0] for note in trace.notes] == [f"{name} could not be read"]
    diagnose([trace])


def test_numbers_in_metadata_may_be_text_or_missing(path: Path) -> None:
    about = {"distributedInfo": {"rank": "2", "world_size": "4"}, "deviceProperties": [{"numSms": None}]}
    path.write_text(json.dumps({**json.loads(path.read_text()), **about}))
    trace = read_trace(path)
    assert (trace.rank, trace.world_size, trace.num_sms, trace.notes) == (2, 4, 0, [])
