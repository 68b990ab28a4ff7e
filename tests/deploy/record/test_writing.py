"""Nothing that happens to a process or a disk costs a record more than a line."""

import errno
import os
from pathlib import Path

import pytest

from record_lines import plan, step
from shoal.deploy.record.lines import NoteLine, PeerLine, StepLine, encode_line
from shoal.deploy.record.reading import read_record, record_of
from shoal.deploy.record.writing import AGAIN_S, RecordFile, thin, thinned
from shoal.protocol.identity import PeerID


class Bench:
    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.said: list[str] = []
        self.path = folder / "run" / "record.jsonl"

    def file(self, **options: int) -> RecordFile:
        return RecordFile(self.path, say=self.said.append, now_s=lambda: self.now_s, **options)

    @property
    def steps(self) -> list[int]:
        return [line.step for line in read_record(self.path).steps]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Takes so many bytes more; `room` may be changed."""
    disk, write = {"room": 1_000_000}, os.write

    def limited(descriptor: int, data: bytes) -> int:
        if not disk["room"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: disk["room"]])
        disk["room"] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    return disk


def test_a_restart_goes_on_behind_what_is_there(bench: Bench) -> None:
    for begin in (1, 4):
        file = bench.file()
        file.append([step(n) for n in range(begin, begin + 3)])
        file.close()
    assert bench.steps == [1, 2, 3, 4, 5, 6]


def test_a_line_that_a_crash_has_torn_does_not_spoil_the_next(bench: Bench) -> None:
    file = bench.file()
    file.append([step(1)])
    file.close()
    with bench.path.open("ab") as torn:
        torn.write(encode_line(step(2))[:40])
    file = bench.file()
    file.append([step(2), step(3)])
    file.close()
    record = read_record(bench.path)
    assert ([line.step for line in record.steps], record.torn) == ([1, 2, 3], 1)


@pytest.mark.parametrize("room", [0, 1, 100, len(encode_line(step(1))), len(encode_line(step(1))) + 5])
def test_a_full_disk_is_said_once_and_nothing_is_missing_once_there_is_room(
    bench: Bench, full_disk: dict[str, int], room: int
) -> None:
    file = bench.file()
    file.append([step(1)])
    full_disk["room"] = room
    for number in (2, 3, 4):
        file.append([step(number)])
        bench.now_s += AGAIN_S
    assert len(bench.said) == 1
    assert "No space left" in bench.said[0]
    assert read_record(bench.path).torn == 0
    assert bench.path.read_bytes().endswith(b"\n")
    full_disk["room"] = 1_000_000
    file.append([step(5)])
    file.close()
    assert bench.steps == [1, 2, 3, 4, 5]
    assert bench.said[1:] == ["the record is written again"]


def test_a_disk_that_took_nothing_is_left_alone_for_a_while(bench: Bench, full_disk: dict[str, int]) -> None:
    file = bench.file()
    full_disk["room"] = 0
    file.append([step(1)])
    full_disk["room"] = 1_000_000
    file.append([step(2)])
    assert bench.path.read_bytes() == b""
    file.close()
    assert bench.steps == [1, 2]


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(bench: Bench) -> None:
    bench.path.parent.parent.joinpath("run").write_text("a file where the folder should be")
    file = bench.file()
    file.append([step(1)])
    file.close()
    assert len(bench.said) == 1


def test_a_record_that_grows_too_large_loses_lines_and_no_sum(bench: Bench) -> None:
    bytes_max = 40 * len(encode_line(step(1)))
    file = bench.file(bytes_max=bytes_max)
    for number in range(1, 1001):
        file.append([step(number, loss=float(number), tokens=7, given_up=1)])
    file.close()
    assert bench.path.stat().st_size < 1.5 * bytes_max
    record = read_record(bench.path)
    assert sum(line.steps for line in record.steps) == 1000
    assert sum(line.tokens for line in record.steps) == 7000
    assert sum(line.given_up for line in record.steps) == 1000
    assert sum((line.loss or 0) * line.steps for line in record.steps) == pytest.approx(sum(range(1, 1001)))
    assert [line.step for line in record.steps][-3:] == [998, 999, 1000]


def test_thinning_never_makes_one_line_of_two_eras(tmp_path: Path) -> None:
    lines = [*(step(n) for n in (1, 2, 3)), step(3, 1), step(4, 1)]
    kept = thinned(lines)
    assert [(line.era, line.step, line.steps) for line in kept if isinstance(line, StepLine)] == [
        (0, 2, 2),
        (0, 3, 1),
        (1, 4, 2),
    ]
    record = record_of(map(encode_line, kept))
    assert [(line.era, line.step) for line in record.steps] == [(0, 2), (1, 4)]


def test_thinning_keeps_what_changed_the_run(tmp_path: Path) -> None:
    def peer(name: str, change: str) -> PeerLine:
        return PeerLine(time=1.0, peer=PeerID(name), name=name, change=change)

    lines = [
        plan(peers=2, reason="first plan"),
        plan(peers=2, reason="hand-over"),
        NoteLine(time=1.0, text="by the way"),
        plan(peers=3, reason="c joined"),
        peer("c", "joined"),
        peer("c", "left"),
        peer("c", "joined"),
        peer("c", "left"),
        step(1),
    ]
    kept = thinned(lines)
    assert kept == [lines[0], lines[3], lines[4], lines[7], lines[8]]


def test_what_is_torn_goes_when_a_record_is_thinned(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_bytes(b"".join(encode_line(step(n)) for n in range(1, 9)) + b'{"kind":"st')
    assert thin(path) == path.stat().st_size
    record = read_record(path)
    assert ([line.step for line in record.steps], record.torn) == ([2, 4, 5, 6, 7, 8], 0)
