"""Leaving the run while a new layout begins."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.peer.membership.departure import Departure
from shoal.peer.services.services import Services


class Membership:
    """A member whose mate begins to leave while it drains, so that it becomes the last holder."""

    is_ready, version = True, 3

    def __init__(self) -> None:
        group = SimpleNamespace(is_learner=False, full_members=("mate",), group_peers=("mate",), standing=(0, 2))
        self.core = SimpleNamespace(group=group, plan=SimpleNamespace(era=0))
        self.is_last, self.stayed = False, 0

    async def drain(self, within_s: float, *, unless: Any) -> bool:
        self.is_last = True
        return not unless()

    def stay(self, plan: object) -> None:
        self.stayed += 1
        self.is_last = False


@pytest.mark.parametrize(("era", "stayed"), [(0, 1), (1, 0)], ids=["the same layout", "another era"])
def test_a_last_holder_takes_traffic_again_only_in_the_era_of_its_layers(era: int, stayed: int) -> None:
    """In another era the plan may have fewer stages, so its stage may not exist."""
    membership = Membership()
    clock = SimpleNamespace(now_s=lambda: 0.0 if membership.stayed == 0 else 99.0)
    services = SimpleNamespace(
        endpoint=SimpleNamespace(on=lambda *_: None, peer_id="me"),
        clock=clock,
        spec=SimpleNamespace(training=SimpleNamespace(steps=9)),
        layers=SimpleNamespace(archive=None, copies=None),
        plans=SimpleNamespace(newest=SimpleNamespace(era=era)),
        parts=SimpleNamespace(all=(membership,)),
        neighbours=SimpleNamespace(leaves=lambda *_: membership.is_last, knows_that_we_leave=lambda _: True),
        reports=None,
    )
    assert not asyncio.run(Departure(cast("Services", services)).run(9.0))
    assert membership.stayed == stayed
