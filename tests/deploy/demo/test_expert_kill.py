"""Whom the one kill of `shoal demo --moe` meets, and when."""

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.deploy.base.children import Children
from shoal.deploy.demo.chaos import kill_a_holder, victim
from shoal.deploy.demo.chronicle import Chronicle
from shoal.deploy.demo.crew import Crew, CrewMember
from shoal.deploy.demo.summary import FaultLine
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertStatus, PeerStatus, SwarmStatus
from shoal.protocol.sim.loop import run
from statuses import swarm_status


def status(*experts: ExpertStatus, names: str = "abc", coordinator: str = "a") -> SwarmStatus:
    peers = tuple(
        PeerStatus(
            peer=PeerID(name),
            name=name,
            device="cpu",
            stage=0,
            version=1,
            synced=True,
            draining=False,
            seen_s_ago=0.1,
            forward_s=0.0,
            window=0,
        )
        for name in names
    )
    return swarm_status(
        coordinator=PeerID(coordinator),
        step=0,
        stages=((0, 1),),
        peers=peers,
        elapsed_s=0.0,
        experts=experts,
    )


class PretendCrew(Crew):
    """Members without processes."""

    def __init__(self, names: str) -> None:
        children = Children(on_line=lambda child, line: None, on_exit=lambda child, code: None)
        super().__init__(children, folder=Path(), spec_path=Path(), data="")
        for name in names:
            child: Any = SimpleNamespace(name=name, is_running=True, exited=asyncio.Event())
            self.members.append(CrewMember(child=child, peer=PeerID(name), awake_since_s=-math.inf))

    async def kill(self, member: CrewMember) -> list[int]:
        member.killed = True
        return [17]


def held(expert: int, load: float, *holders: int) -> ExpertStatus:
    return ExpertStatus(stage=0, expert=expert, load=load, holders=holders)


def test_it_meets_a_holder_of_the_busiest_who_does_not_coordinate() -> None:
    crew = PretendCrew("abc")
    found = victim(crew, status(held(0, 0.2, 0, 1), held(1, 0.8, 0, 2)), now_s=0.0)
    assert found is not None
    assert (found[0].name, found[1].expert) == ("c", 1)
    found = victim(crew, status(held(0, 0.2, 0, 1), held(1, 0.8, 0, 2), coordinator="c"), now_s=0.0)
    assert found is not None
    assert found[0].name == "a"


def test_who_alone_has_an_expert_is_spared() -> None:
    crew = PretendCrew("abc")
    found = victim(crew, status(held(0, 0.2, 2), held(1, 0.8, 0, 2)), now_s=0.0)
    assert found is not None
    assert found[0].name == "a", "c alone has expert 0"
    assert victim(crew, status(held(0, 0.2, 0, 1), held(1, 0.8, 2)), now_s=0.0) is None
    assert victim(crew, status(held(0, 0.0, 0, 1), held(1, 0.0, 0, 2)), now_s=0.0) is None, "nobody has told of loads"
    assert victim(crew, status(), now_s=0.0) is None


def test_it_waits_for_its_time_and_comes_once() -> None:
    crew, faults, left = PretendCrew("abc"), list[FaultLine](), list[tuple[str, list[int]]]()
    seen = itertools.chain([None], itertools.repeat(status(held(1, 1.0, 0, 2))))

    class PretendChronicle(Chronicle):
        def __init__(self) -> None: ...

        @property
        def status(self) -> SwarmStatus | None:
            return next(seen)

        def take_fault(self, fault: FaultLine) -> None:
            faults.append(fault)

        def take_left_behind(self, name: str, processes: Sequence[int]) -> None:
            left.append((name, list(processes)))

    async def main() -> float:
        loop = asyncio.get_running_loop()
        await kill_a_holder(crew, PretendChronicle(), is_time=lambda: loop.time() >= 9.0)
        return loop.time()

    assert 9.0 < run(main()) < 10.0
    assert faults == [FaultLine(kind="kill", peer="c", stage=0, expert=1)]
    assert left == [("c", [17])]
    assert [member.name for member in crew.alive] == ["a", "b"]
