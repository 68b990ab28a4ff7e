"""Which of its tenures a peer begins, keeps and drops by a plan, while others of them come to their end."""

import asyncio
from types import SimpleNamespace
from typing import Any

from shoal.peer.base.failures import Failures
from shoal.peer.membership.expert_seats import ExpertSeats
from shoal.peer.presence.parts import Parts
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import ExpertGroup, Member, Plan, Stage
from shoal.protocol.sim.loop import run

ME, MATE = PeerID("me"), PeerID("mate")


def plan_without_me() -> Plan:
    mate = (Member(MATE, 1.0, 1.0, 1),)
    return Plan(
        run="r",
        term=1,
        sequence=2,
        previous="",
        coordinator=MATE,
        stages=(Stage(0, 1, (Member(ME, 1.0, 1.0, 1), *mate)),),
        experts=tuple(ExpertGroup(0, expert, mate) for expert in range(3)),
    )


class PretendMembership:
    """One of group `group_id` whose place is another's now; `on_close` happens while it is being closed."""

    def __init__(self, group_id: int, on_close: Any = None) -> None:
        self.group_id, self._on_close = group_id, on_close
        self.audience: list[PeerID] = []
        self.work = SimpleNamespace(runtime=SimpleNamespace(keys=()))
        self.is_closed = False

    def is_place_of(self, plan: Plan) -> bool:
        return False

    async def close(self) -> None:
        self.is_closed = True
        await asyncio.sleep(0.1)
        if self._on_close is not None:
            await self._on_close()


def test_one_that_has_drained_while_another_was_dropped_is_passed_over() -> None:
    async def main() -> None:
        failures = Failures()
        signed: Any = SimpleNamespace(plan=plan_without_me(), digest="d")
        services: Any = SimpleNamespace(
            endpoint=SimpleNamespace(peer_id=ME, era=0, incarnation=1),
            failures=failures,
            layers=SimpleNamespace(server=SimpleNamespace(forget=lambda keys: None)),
            plans=SimpleNamespace(signed=signed),
            life=SimpleNamespace(is_leaving=False),
            parts=Parts(),
            neighbours=SimpleNamespace(
                say=lambda peers: None, say_news=lambda peers: None, words=lambda: (), announce=lambda: None
            ),
            clock=SimpleNamespace(now_s=lambda: 0.0),
        )
        seats = ExpertSeats(services)
        drained: Any = PretendMembership(2)
        first: Any = PretendMembership(1, on_close=lambda: seats._drop(2))
        seats._memberships = {1: first, 2: drained}
        seats._draining = {2}
        seats.follow_soon()
        assert seats._transition is not None
        await asyncio.wait({seats._transition})
        assert not failures.first.done()
        assert first.is_closed
        assert drained.is_closed
        assert seats.memberships == []
        await seats.close()

    run(main())
