"""What chaos does, and to whom: no processes, but children that pretend."""

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from shoal.deploy.base.children import Children
from shoal.deploy.demo.chaos import (
    COMES_BACK_EVERY,
    HEARD_S,
    SETTLED_S,
    Chaos,
    ChaosOptions,
    expendable,
    schedule,
)
from shoal.deploy.demo.chronicle import Chronicle
from shoal.deploy.demo.crew import Crew, CrewMember
from shoal.deploy.demo.summary import FaultLine
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertStatus, PeerStatus, SwarmStatus
from shoal.protocol.sim.loop import run
from statuses import swarm_status


def status(stages: dict[str, int | None], *, coordinator: str = "a", unsynced: str = "") -> SwarmStatus:
    peers = tuple(
        PeerStatus(
            peer=PeerID(name),
            name=name,
            device="cpu",
            stage=stage,
            version=1,
            synced=stage is not None and name not in unsynced,
            draining=False,
            seen_s_ago=0.1,
            forward_s=0.0,
            window=0,
        )
        for name, stage in stages.items()
    )
    return swarm_status(
        coordinator=PeerID(coordinator),
        step=0,
        stages=((0, 1), (1, 2)),
        peers=peers,
        elapsed_s=0.0,
    )


class PretendCrew(Crew):
    """Members without processes; writes down what is done to them."""

    def __init__(self, names: str) -> None:
        children = Children(on_line=lambda child, line: None, on_exit=lambda child, code: None)
        super().__init__(children, folder=Path(), spec_path=Path(), data="")
        self.done: list[str] = []
        self._next = itertools.count(1)
        for name in names:
            self._add(name).peer = PeerID(name)

    def _add(self, name: str, awake_since_s: float = -math.inf) -> CrewMember:
        child: Any = SimpleNamespace(name=name, is_running=True, exited=asyncio.Event())
        self.members.append(CrewMember(child=child, awake_since_s=awake_since_s))
        return self.members[-1]

    async def start(self, name: str = "") -> CrewMember:
        member = self._add(name or f"new-{next(self._next)}")
        member.peer = PeerID(name) if name else None
        self.done.append(f"start {member.name}")
        return member

    async def let_in(self, member: CrewMember) -> None:
        self.done.append(f"let {member.name} in")

    async def kill(self, member: CrewMember) -> list[int]:
        member.killed = True
        child: Any = member.child
        child.is_running = False
        child.exited.set()
        self.done.append(f"kill {member.name}")
        return []

    def suspend(self, member: CrewMember) -> None:
        member.suspended = True
        self.done.append(f"suspend {member.name}")

    def resume(self, member: CrewMember) -> None:
        member.suspended = False
        self.done.append(f"resume {member.name}")


class PretendChronicle(Chronicle):
    """Knows what `see` returns, and keeps the faults."""

    def __init__(self, see: Callable[[], SwarmStatus | None], faults: list[FaultLine]) -> None:
        self._see, self._faults = see, faults

    @property
    def status(self) -> SwarmStatus | None:
        return self._see()

    def take_fault(self, fault: FaultLine) -> None:
        self._faults.append(fault)


def test_the_schedule_is_the_seeds_and_has_a_bit_of_everything() -> None:
    options = ChaosOptions(kill_every_s=15.0)
    for seed in range(20):
        acts = list(itertools.islice(schedule(options, random.Random(seed)), 12))
        assert acts == list(itertools.islice(schedule(options, random.Random(seed)), 12))
        kills = [act for act in acts if act.kind != "suspend"]
        assert [act.at_s for act in kills] == [15.0 * turn for turn in range(1, 12)]
        assert [act.kind for act in kills].count("kill_coordinator") == 1
        assert [act.kind for act in kills[:2]].count("kill_coordinator") == 1
        assert [act.comes_back for act in kills].count(True) == 11 // COMES_BACK_EVERY
        assert [act.at_s for act in acts] == sorted(act.at_s for act in acts)
        assert next(act.at_s for act in acts if act.kind == "suspend") in (22.5, 37.5)
    assert len({next(schedule(options, random.Random(seed))) for seed in range(20)}) > 1


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_between_faults_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        ChaosOptions(kill_every_s=seconds)


def names(members: list[CrewMember]) -> list[str]:
    return [member.name for member in members]


def test_the_only_one_who_holds_its_stage_is_spared() -> None:
    async def main() -> None:
        crew = PretendCrew("abcd")
        assert names(expendable(crew, status({"a": 0, "b": 0, "c": 1, "d": None}), now_s=0.0)) == ["a", "b", "d"]
        assert names(expendable(crew, status({"a": 0, "b": 0, "c": 1, "d": 1}), now_s=0.0)) == ["a", "b", "c", "d"]
        # A mate counts once it has fetched the state; a peer from outside counts as well.
        assert names(expendable(crew, status({"a": 0, "b": 0, "c": 1, "d": 1}, unsynced="d"), now_s=0.0)) == [
            "a",
            "b",
            "d",
        ]
        assert names(expendable(crew, status({"a": 0, "b": 0, "c": 1, "outsider": 1, "d": 1}), now_s=0.0)) == [*"abcd"]
        await crew.kill(crew.members[0])
        crew.suspend(crew.members[2])
        # The status may still know whom we have just killed or stopped.
        assert names(expendable(crew, status({"a": 0, "b": 0, "c": 1, "d": 1}), now_s=0.0)) == []

    run(main())


def test_nothing_is_left_to_a_peer_that_the_status_cannot_speak_of() -> None:
    async def main() -> None:
        crew = PretendCrew("abc")
        seen = status({"a": 0, "b": 0, "c": 1})
        # A resumed member may find that a plan has dropped it; the status is of the time before.
        crew.members[0].awake_since_s = 100.0
        assert names(expendable(crew, seen, now_s=100.0 + SETTLED_S - 0.1)) == ["a"]
        assert names(expendable(crew, seen, now_s=100.0 + SETTLED_S)) == ["a", "b"]
        # One that came back under its name holds what it has fetched since, and nothing by its former life.
        await crew.kill(crew.members[1])
        (await crew.start("b")).awake_since_s = 200.0
        assert names(expendable(crew, seen, now_s=200.0 + SETTLED_S - 0.1)) == ["b"]
        assert names(expendable(crew, seen, now_s=200.0 + SETTLED_S)) == ["a", "b"]
        # One that has been silent for long may be gone.
        silent = tuple(msgspec.structs.replace(p, seen_s_ago=HEARD_S + 0.1 * (p.peer == "a")) for p in seen.peers)
        assert names(expendable(crew, msgspec.structs.replace(seen, peers=silent), now_s=300.0)) == ["a"]

    run(main())


def test_the_only_one_who_holds_an_expert_is_spared() -> None:
    crew = PretendCrew("abc")
    seen = status({"a": 0, "b": 0, "c": 0})
    one = ExpertStatus(stage=0, expert=0, holders=(1,), coming=(2,))
    assert names(expendable(crew, msgspec.structs.replace(seen, experts=(one,)), now_s=0.0)) == ["a", "c"]
    two = ExpertStatus(stage=0, expert=0, holders=(1, 2))
    assert names(expendable(crew, msgspec.structs.replace(seen, experts=(two,)), now_s=0.0)) == ["a", "b", "c"]
    crew.suspend(crew.members[2])
    assert names(expendable(crew, msgspec.structs.replace(seen, experts=(two,)), now_s=0.0)) == ["a"]


def play(options: ChaosOptions, crew: PretendCrew, see: Any, until_s: float) -> list[FaultLine]:
    """One run in virtual time."""
    faults: list[FaultLine] = []

    async def main() -> None:
        await Chaos(crew, PretendChronicle(see, faults), options, until_s=until_s).run()

    run(main())
    return faults


def whole(crew: PretendCrew) -> SwarmStatus:
    """Everybody alive in one stage, the eldest coordinates."""
    alive = [member.name for member in crew.alive]
    return status(dict.fromkeys(alive, 0), coordinator=alive[0])


def test_a_run_of_faults() -> None:
    crew = PretendCrew("abcdef")

    def see() -> SwarmStatus:
        for member in crew.members:
            member.peer = PeerID(member.name)
        return whole(crew)

    faults = play(ChaosOptions(seed=3, kill_every_s=4.0, suspend_s=5.0), crew, see, until_s=24.5)
    kinds = [fault.kind for fault in faults]
    assert kinds.count("kill") + kinds.count("kill_coordinator") == 6
    assert kinds.count("kill_coordinator") >= 1
    assert (kinds.count("suspend"), kinds.count("resume")) == (1, 1)
    assert (kinds.count("start"), kinds.count("return")) == (4, 2)
    assert len(crew.alive) == 6, "each one who is killed has a successor"
    suspended = next(fault.peer for fault in faults if fault.kind == "suspend")
    between = crew.done[crew.done.index(f"suspend {suspended}") : crew.done.index(f"resume {suspended}")]
    assert f"kill {suspended}" not in between
    for fault in faults:
        if fault.kind == "return":
            assert (f"kill {fault.peer}", f"start {fault.peer}") in itertools.pairwise(crew.done)


def test_a_fault_waits_for_somebody_whom_the_run_can_lose_and_the_next_keeps_its_distance() -> None:
    crew = PretendCrew("ab")
    times: list[float] = []

    def see() -> SwarmStatus | None:
        now_s = asyncio.get_running_loop().time()
        if now_s < 20.0:
            return None  # between two coordinators
        return status({"a": 0, "b": 0, "new-1": 0, "new-2": 0, "new-3": 0, "outsider": 0}, coordinator="a")

    class Watched(PretendCrew):
        async def kill(self, member: CrewMember) -> list[int]:
            times.append(asyncio.get_running_loop().time())
            return await super().kill(member)

    crew = Watched("ab")
    play(ChaosOptions(seed=1, kill_every_s=4.0, suspend_s=1.0), crew, see, until_s=9.0)
    assert times[0] >= 20.0
    assert all(later - earlier > 3.9 for earlier, later in itertools.pairwise(times))


def test_who_is_suspended_goes_on_when_chaos_is_called_off() -> None:
    crew = PretendCrew("abc")

    async def main() -> None:
        chronicle = PretendChronicle(lambda: whole(crew), [])
        chaos = Chaos(crew, chronicle, ChaosOptions(seed=0, kill_every_s=2.0, suspend_s=1000.0), until_s=None)
        task = asyncio.create_task(chaos.run())
        await asyncio.sleep(6.0)  # three kills, and half-way between two of them the suspension
        assert any(member.suspended for member in crew.members)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert not any(member.suspended for member in crew.members)

    run(main())
