"""How long a holder keeps reduced gradients for those who get ready for the following layout."""

import asyncio

import torch

from shoal.peer.handoff.trail import TRAIL_STEPS_MIN, Trail
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPLAYED_BYTES_MAX
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run

ME, OTHER = PeerID("me"), PeerID("other")
STAGES = (Stage(0, 2, (Member(ME, 1.0, 1.0),)),)


def plan(*, era: int = 0, follows: bool = True, fresh: bool = False) -> Plan:
    return Plan(
        run="r",
        term=1,
        sequence=1,
        previous="",
        coordinator=ME,
        stages=STAGES,
        era=era,
        restore_era=max(0, era - 1),
        fresh=fresh,
        following=STAGES if follows else (),
    )


def noted(*versions: int, trail: Trail | None = None) -> Trail:
    if trail is None:
        trail = Trail()
        trail.follow(plan())
    for version in versions:
        trail.note(0, version, {"layers.0": torch.full((2,), float(version))})
    return trail


def kept(trail: Trail, version: int, *, era: int = 0) -> bool:
    return run(trail.read(era, version, "layers.0", patience_s=0.1)) is not None


def test_nothing_is_kept_while_the_layout_is_not_to_end() -> None:
    trail = Trail()
    trail.follow(plan(follows=False))
    noted(5, trail=trail)
    assert not trail.is_wanted
    assert not kept(trail, 5)


def test_a_gradient_is_kept_until_everybody_who_replays_has_asked_for_a_later_one() -> None:
    trail = noted(5)
    trail.wants(OTHER, 6)
    noted(6, 7, 8, trail=trail)
    assert [version for version in (5, 6, 7, 8) if kept(trail, version)] == [6, 7, 8]
    trail.wants(OTHER, 8)
    noted(9, trail=trail)
    assert [version for version in (6, 7, 8, 9) if kept(trail, version)] == [8, 9]


def test_who_fetches_another_layer_still_replays_those_before() -> None:
    trail = noted(5)
    trail.wants(OTHER, 6)
    trail.wants(OTHER, 8, at_least=True)
    noted(6, 7, 8, trail=trail)
    assert kept(trail, 6)


def test_what_is_kept_is_bounded() -> None:
    trail = Trail()
    trail.follow(plan())
    trail.wants(OTHER, 1)
    large_N = torch.empty(REPLAYED_BYTES_MAX // 8, device="meta")
    for version in range(1, 3 * TRAIL_STEPS_MIN):
        trail.note(0, version, {"layers.0": large_N})
    assert trail.num_bytes <= TRAIL_STEPS_MIN * 4 * large_N.numel()
    assert kept(trail, 3 * TRAIL_STEPS_MIN - 1)
    assert not kept(trail, 1)


def test_who_asks_for_the_next_step_waits_for_it() -> None:
    trail = noted(5)

    async def main() -> None:
        asking = asyncio.create_task(trail.read(0, 6, "layers.0", patience_s=9.0))
        await asyncio.sleep(1.0)
        assert not asking.done()
        noted(6, trail=trail)
        gradient_N = await asking
        assert gradient_N is not None
        assert gradient_N.tolist() == [6.0, 6.0]

    run(main())


def test_the_last_steps_are_there_until_the_next_layout_is_under_way() -> None:
    trail = noted(5)
    trail.follow(plan(era=1, follows=False, fresh=True))
    assert kept(trail, 5)
    assert not kept(trail, 5, era=1)
    trail.follow(plan(era=1, follows=False))
    assert not kept(trail, 5)


def test_what_is_called_off_leaves_nothing() -> None:
    trail = noted(5)
    trail.follow(plan(follows=False))
    trail.follow(plan())
    assert not kept(trail, 5)
