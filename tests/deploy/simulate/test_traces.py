"""Traces: three forms of file, what is refused, and how devices live through one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.deploy.simulate.modelled import Churn, absent_at_first
from shoal.deploy.simulate.scenario import SHIPPED
from shoal.deploy.simulate.traces import TraceEvent, load_trace, replay
from shoal.protocol.errors import LocalError


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_comings_and_goings(tmp_path: Path) -> None:
    path = written(tmp_path, "time_s,event,node\n0,add,a\n2.5,add,b\n2.5,remove,a\n9,add,a\n")
    assert load_trace(path) == ((0.0, "add", "a"), (2.5, "add", "b"), (2.5, "remove", "a"), (9.0, "add", "a"))


def test_down_times_overlap_and_begin_at_zero(tmp_path: Path) -> None:
    path = written(tmp_path, "down_start_s,down_end_s,node\n0,4,a\n10,20,b\n15,30,b\n40,41,a\n")
    assert load_trace(path) == (
        (0.0, "add", "b"),
        (4.0, "add", "a"),
        (10.0, "remove", "b"),
        (30.0, "add", "b"),
        (40.0, "remove", "a"),
        (41.0, "add", "a"),
    )


def test_counts_name_nodes_and_draw_who_goes(tmp_path: Path) -> None:
    path = written(tmp_path, "time_s,available\n0,0\n5,3\n10,3\n15,1\n20,2\n")
    first = load_trace(path, seed=1)
    assert [(e.at_s, e.kind) for e in first] == [(5, "add")] * 3 + [(15, "remove")] * 2 + [(20, "add")]
    assert load_trace(path, seed=1) == first
    assert len({load_trace(path, seed=seed) for seed in range(20)}) > 1
    assert first[-1].node == "node3", "a node that went is not the one that comes"


HEADERS = {"events": "time_s,event,node\n", "down": "down_start_s,down_end_s,node\n", "counts": "time_s,available\n"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is not a trace: its first line is ''"),
        ("time,event\n", "is not a trace: its first line is 'time,event'"),
        (HEADERS["events"], "it has no events"),
        (HEADERS["events"] + "0,add\n", "line 2: 2 fields, not 3"),
        (HEADERS["events"] + "0,add,a\nnan,add,b\n", "line 3: 'nan' is not a time"),
        (HEADERS["events"] + "inf,add,b\n", "line 2: 'inf' is not a time"),
        (HEADERS["events"] + "-1,add,b\n", "line 2: '-1' is not a time"),
        (HEADERS["events"] + "soon,add,b\n", "line 2: 'soon' is not a time"),
        (HEADERS["events"] + "5,add,a\n4,add,b\n", "line 3: at 4 s, after 5 s"),
        (HEADERS["events"] + "5,add,a\n6,add,a\n", "line 3: 'a' is added twice"),
        (HEADERS["events"] + "5,remove,a\n", "line 2: 'a' is removed and not there"),
        (HEADERS["events"] + "5,stop,a\n", "line 2: 'stop' is neither add nor remove"),
        (HEADERS["down"] + "5,4,a\n", "line 2: 'a' is up again before it is down"),
        (HEADERS["counts"] + "5,4\n4,4\n", "line 3: at 4 s, after 5 s"),
        (HEADERS["counts"] + "5,-4\n", "line 2: '-4' is not a number of nodes"),
        (HEADERS["counts"] + "5,4.5\n", "line 2: '4.5' is not a number of nodes"),
        (HEADERS["counts"] + "5,999999999\n", "line 2: '999999999' is not a number of nodes"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(LocalError) as caught:
        load_trace(written(tmp_path, text))
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be read: No such file"):
        load_trace(tmp_path / "none.csv")
    (tmp_path / "image").write_bytes(b"\xff\xd8\xff\xe0")
    with pytest.raises(LocalError, match="is not text"):
        load_trace(tmp_path / "image")


def trace(*events: tuple[float, str, str]) -> tuple[TraceEvent, ...]:
    return tuple(TraceEvent(at_s, "add" if kind == "add" else "remove", node) for at_s, kind, node in events)


FOUR = trace((0, "add", "a"), (10, "add", "b"), (20, "remove", "a"), (30, "add", "c"))


def test_a_device_stands_for_one_node_after_another() -> None:
    churn = replay(FOUR, num_devices=2, seconds=100, start_s=0)
    assert churn == (Churn(10, "add", 1), Churn(20, "remove", 0), Churn(30, "add", 0))
    assert absent_at_first(churn) == {1}


def test_the_run_begins_in_the_middle_and_lives_faster() -> None:
    churn = replay(FOUR, num_devices=2, seconds=100, start_s=15, speedup=5)
    assert churn == (Churn(1, "remove", 0), Churn(3, "add", 0))
    assert not absent_at_first(churn)


def test_who_never_comes_is_added_after_the_end() -> None:
    churn = replay(FOUR, num_devices=2, seconds=4, start_s=0)
    assert churn == (Churn(5, "add", 1),)
    assert absent_at_first(churn) == {1}


def test_of_a_larger_swarm_those_without_a_copy_of_the_trace_stay() -> None:
    trace = [TraceEvent(0.0, "add", "a"), TraceEvent(0.0, "add", "b"), TraceEvent(30.0, "remove", "b")]
    events = replay(trace, num_devices=10, seconds=60.0, start_s=0.0, copies_max=1)
    assert [(event.at_s, event.kind, event.device) for event in events] == [(30.0, "remove", 1)]


def test_nodes_without_a_free_device_are_left_out() -> None:
    assert replay(FOUR, num_devices=1, seconds=100, start_s=0) == (Churn(20, "remove", 0), Churn(30, "add", 0))


def test_a_larger_swarm_lives_through_copies_at_other_times() -> None:
    churn = replay(FOUR, num_devices=4, seconds=10, start_s=0)
    assert churn == (Churn(10, "add", 1), Churn(10, "remove", 2))
    assert absent_at_first(churn) == {1}


@given(
    devices=st.integers(1, 100),
    seconds=st.floats(1, 50_000),
    speedup=st.floats(0.1, 100),
    start_s=st.none() | st.floats(0, 50_000),
)
def test_devices_come_and_go_in_turn(devices: int, seconds: float, speedup: float, start_s: float | None) -> None:
    recorded = load_trace(SHIPPED / "aws_p3_bamboo.csv")
    churn = replay(recorded, num_devices=devices, seconds=seconds, start_s=start_s, speedup=speedup)
    up = set(range(devices)) - absent_at_first(churn)
    last_s = 0.0
    for at_s, kind, device in churn:
        assert last_s <= at_s <= seconds + 1.0
        assert 0 <= device < devices
        assert (device in up) == (kind == "remove")
        (up.discard if kind == "remove" else up.add)(device)
        last_s = at_s
