"""What a peer's record has in the end, whoever knew what, and whatever happened to the peer meanwhile."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from shoal.deploy.record.exports import scalars
from shoal.deploy.record.past import Past
from shoal.deploy.record.reading import Record, read_record
from shoal.deploy.record.report import Note, Obeys, Recorded, Report, Reporter, Status, Validated
from shoal.deploy.session import recorder as recorder_module
from shoal.deploy.session.recorder import Recorder, recording, start_line
from shoal.peer.model.schedule import rate_of
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import HISTORY_PER_REPLY_MAX
from shoal.protocol.messages import (
    CommitReport,
    Comparison,
    History,
    HistoryRequest,
    PeerStatus,
    ValidationReport,
)
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.spec import RunSpec, SwarmSpec, TrainingSpec
from statuses import swarm_status

SPEC = RunSpec(name="notes", training=TrainingSpec(steps=2000), swarm=SwarmSpec(stages=2, min_peers=2))
HOST, ANA, BEN = map(PeerID, ("host", "ana", "ben"))
PLAN = Plan(
    run="r",
    term=1,
    sequence=1,
    previous="",
    coordinator=ANA,
    stages=tuple(
        Stage(first, last, tuple(Member(peer, 1.0, 1.0) for peer in peers))
        for first, last, peers in ((0, 3, [HOST, BEN]), (3, 6, [ANA]))
    ),
)


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing will not come."""
    monkeypatch.setattr(recorder_module, "LAST_WORDS_S", 0.0)


class Clock:
    def now_s(self) -> float:
        return 100.0

    def wall_s(self) -> float:
        return 1e9


class World:
    """Peers that remember, and an endpoint that reaches them."""

    def __init__(self) -> None:
        self.peer_id = HOST
        self.pasts = {peer: Past(Clock()) for peer in (HOST, ANA, BEN)}
        self.gone: set[PeerID] = set()

    async def ask(self, peer: PeerID, message: HistoryRequest, expect: type, *, timeout_s: float) -> History:
        if peer in self.gone:
            raise Unreachable(peer, "is gone")
        return self.pasts[peer].since(message)

    def commit(self, steps: Sequence[int], *, era: int = 0, known_to: Sequence[PeerID] = (HOST, ANA, BEN)) -> None:
        for step in steps:
            for stage, peers in enumerate(((HOST, BEN), (ANA,))):
                for peer in peers:
                    if peer in known_to:
                        self.pasts[peer].committed(commit(stage, step, era))


def commit(stage: int, step: int, era: int = 0) -> CommitReport:
    return CommitReport(
        era=era,
        stage=stage,
        step=step,
        members=2 - stage,
        microbatches=8,
        duplicates=0,
        given_up=0,
        tokens=SPEC.tokens_per_step,
        staleness_steps_mean=0.0,
        loss=5.0 - step / 1000 if stage == 1 else None,
        digest="",
        gradient_norm=3.0 + stage,
    )


def recorder_in(folder: Path | None, reports: Reporter) -> Recorder:
    return Recorder(start_line(SPEC, run="r", peer=HOST, peer_name="host"), SPEC, reports, folder=folder)


def sitting(folder: Path | None, world: World, *, finished: bool = False, says: Sequence[Report] = ()) -> list[Report]:
    """One start of the host, until its end."""
    heard: list[Report] = []

    async def main() -> None:
        reports = Reporter()
        reports.listeners.append(heard.append)
        recorder = recorder_in(folder, reports)
        recorder.open()
        for report in says:
            reports.say(report)
        endpoint: Any = world
        await recorder.finish(endpoint, world.pasts[HOST], PLAN, finished=finished)
        recorder.close()

    asyncio.run(main())
    return heard


def steps(record: Record) -> list[tuple[int, int]]:
    return [(line.era, line.step) for line in record.steps]


def test_every_step_is_there_with_what_was_measured_of_it(tmp_path: Path) -> None:
    world = World()
    world.commit(range(3))
    heard = sitting(tmp_path, world)
    record = read_record(tmp_path)
    assert steps(record) == [(0, 1), (0, 2), (0, 3)]
    last = record.steps[-1]
    assert (last.loss, last.gradient_norm, last.gradient_norms) == (4.998, 5.0, (3.0, 4.0))
    assert last.perplexity == pytest.approx(148.1, abs=0.1)
    assert last.learning_rate == rate_of(SPEC, 2)
    assert (last.tokens, last.peers) == (SPEC.tokens_per_step, 3)
    (start,), (end,) = record.starts, record.ends
    assert (start.name, start.peer_name, start.steps) == ("notes", "host", 2000)
    assert (end.step, end.finished, end.lost) == (3, False, 0)
    (told,) = [said for said in heard if isinstance(said, Recorded)]
    assert [line.step for line in told.steps] == [1, 2, 3]


def test_what_was_done_while_the_peer_was_away_is_asked_of_the_others_once(tmp_path: Path) -> None:
    world = World()
    world.commit(range(3))
    sitting(tmp_path, world)
    world.pasts[HOST] = Past(Clock())  # it starts anew and remembers nothing
    world.commit(range(3, 3 + 3 * HISTORY_PER_REPLY_MAX), known_to=(ANA, BEN))
    sitting(tmp_path, world)
    record = read_record(tmp_path)
    assert [line.step for line in record.steps] == list(range(1, 4 + 3 * HISTORY_PER_REPLY_MAX))
    lines = (tmp_path / "record.jsonl").read_text().count('"kind":"step"')
    assert lines == len(record.steps)
    assert [end.lost for end in record.ends] == [0, 0]


@pytest.mark.usefixtures("in_a_hurry")
def test_what_only_somebody_who_is_gone_knew_leaves_a_gap_that_is_said(tmp_path: Path) -> None:
    world = World()
    world.commit(range(3))
    sitting(tmp_path, world)
    world.pasts = {peer: Past(Clock()) for peer in world.pasts}
    world.commit([7, 8])
    sitting(tmp_path, world)
    record = read_record(tmp_path)
    assert [line.step for line in record.steps] == [1, 2, 3, 8, 9]
    assert record.ends[-1].lost == 4


def test_steps_that_are_done_again_supersede(tmp_path: Path) -> None:
    world = World()
    world.commit(range(6))
    sitting(tmp_path, world)
    back = Obeys(term=2, sequence=3, coordinator=ANA, reason="back", peers=3, stages=2, era=1, restored=4)
    world.commit(range(4, 8), era=1)
    sitting(tmp_path, world, says=[back])
    record = read_record(tmp_path)
    assert steps(record) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 5), (1, 6), (1, 7), (1, 8)]
    assert [(line.era, line.step) for line in record.redone] == [(0, 5), (0, 6)]


@pytest.mark.usefixtures("in_a_hurry")
def test_a_member_that_does_not_answer_is_no_reason_to_wait_for_ever(tmp_path: Path) -> None:
    world = World()
    world.commit(range(3))
    world.gone.add(ANA)
    sitting(tmp_path, world)
    record = read_record(tmp_path)
    assert steps(record) == []
    assert record.ends[0].lost == 3
    world.gone.clear()
    sitting(tmp_path, world)
    assert steps(read_record(tmp_path)) == [(0, 1), (0, 2), (0, 3)]


def test_validations_come_once_with_their_version(tmp_path: Path) -> None:
    world = World()
    world.commit(range(5))
    told = ValidationReport(step=4, loss=2.5, microbatches=4)
    world.pasts[BEN].validated(told)
    status = swarm_status(
        coordinator=ANA, stages=(), peers=(), elapsed_s=0.0, step=5, validation_loss=2.5, validation_step=4
    )
    sitting(tmp_path, world, says=[Validated(report=told), Status(status=status)])
    (line,) = read_record(tmp_path).validations
    assert (line.step, line.loss) == (4, 2.5)


def test_a_validation_that_a_mate_led_while_we_were_away_is_found(tmp_path: Path) -> None:
    world = World()
    world.commit(range(5))
    world.pasts[BEN].validated(ValidationReport(step=4, loss=2.5, microbatches=4))
    sitting(tmp_path, world)
    assert [(line.step, line.loss) for line in read_record(tmp_path).validations] == [(4, 2.5)]


def test_who_came_moved_and_went_and_what_was_said(tmp_path: Path) -> None:
    def table(*peers: tuple[PeerID, int | None]) -> Status:
        listed = tuple(
            PeerStatus(
                peer=peer,
                name=f"it is {peer}\x1b[2J",
                device="cpu",
                stage=stage,
                version=0,
                synced=True,
                draining=False,
                seen_s_ago=0.0,
                forward_s=0.0,
                window=0,
            )
            for peer, stage in peers
        )
        return Status(
            status=swarm_status(coordinator=ANA, stages=((0, 3), (3, 6)), peers=listed, elapsed_s=0.0, step=0)
        )

    says = [table((HOST, 0), (ANA, 1)), table((HOST, 0), (ANA, 0)), table((HOST, 0), (ANA, 0)), Note(text="by the way")]
    sitting(tmp_path, World(), says=says)
    record = read_record(tmp_path)
    assert [(line.peer, line.change, line.stage) for line in record.peers] == [
        (HOST, "joined", 0),
        (ANA, "joined", 1),
        (ANA, "moved", 0),
    ]
    assert all("\x1b" not in line.name for line in record.peers)
    assert [note.text for note in record.notes] == ["by the way"]


def test_a_step_keeps_what_the_plan_of_its_time_foresaw(tmp_path: Path) -> None:
    world = World()
    world.commit(range(3))
    told = swarm_status(coordinator=ANA, stages=((0, 3), (3, 6)), peers=(), elapsed_s=0.0, step=1)
    foreseen = msgspec.structs.replace(told, comparison=Comparison(900.0, "foreseen 900 tokens/s"))
    sitting(tmp_path, world, says=[Status(status=foreseen)])
    lines = read_record(tmp_path).steps
    assert [line.foreseen_tokens_per_s for line in lines] == [None, 900.0, 900.0]
    assert scalars(lines[-1])["swarm/tokens_per_s_foreseen"] == 900.0


@pytest.mark.usefixtures("in_a_hurry")
def test_a_run_that_is_done_says_so(tmp_path: Path) -> None:
    world = World()
    world.commit(range(1998, 2000))
    sitting(tmp_path, world, finished=True)
    (end,) = read_record(tmp_path).ends
    assert (end.step, end.finished) == (2000, True)


def test_without_a_folder_nothing_is_written_and_the_steps_are_told(tmp_path: Path) -> None:
    world = World()
    world.commit(range(3))
    heard = sitting(None, world)
    assert [line.step for said in heard if isinstance(said, Recorded) for line in said.steps] == [1, 2, 3]


def test_who_wants_neither_record_nor_page_asks_nobody(tmp_path: Path) -> None:
    async def main() -> None:
        reports = Reporter()
        recorder, nobody, past = recorder_in(None, reports), cast(Any, None), Past(Clock())
        async with recording(recorder, None):
            assert reports.listeners == []
            await recorder.run(nobody, past, lambda: PLAN)
            await recorder.finish(nobody, past, PLAN, finished=True)

    asyncio.run(main())


def test_a_peer_remembers_a_bounded_past_oldest_first() -> None:
    past = Past(Clock())
    for step in range(5000):
        past.committed(commit(0, step))
        past.committed(commit(0, step))  # from another member
    said = past.since(HistoryRequest((0, 0), (0, 0)))
    assert len(said.commits) == HISTORY_PER_REPLY_MAX
    steps = [known.report.step for known in said.commits]
    assert steps == list(range(steps[0], steps[0] + HISTORY_PER_REPLY_MAX))
    assert steps[0] > 2000
    assert past.since(HistoryRequest((0, 4999), (0, 0))).commits[0].report.step == 4999
    assert len(msgspec.msgpack.encode(said)) < 128 * 1024
