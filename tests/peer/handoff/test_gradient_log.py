"""How long a holder keeps reduced gradients for those who get ready for the following layout."""

import asyncio

import torch

from shoal.peer.handoff.retained import TRAIL_STEPS_MIN, GradientLog
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import REPLAYED_BYTES_MAX
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run

ME, OTHER = PeerID("me"), PeerID("other")
STAGES = (Stage(0, 2, (Member(ME, 1.0, 1.0),)),)


def plan(*, era: int = 0, follows: bool = True, not_started: bool = False) -> Plan:
    return Plan(
        run="r",
        term=1,
        sequence=1,
        previous="",
        coordinator=ME,
        stages=STAGES,
        era=era,
        restore_era=max(0, era - 1),
        not_started=not_started,
        next_layout=STAGES if follows else (),
    )


def noted(*versions: int, gradient_log: GradientLog | None = None) -> GradientLog:
    if gradient_log is None:
        gradient_log = GradientLog()
        gradient_log.follow(plan())
    for version in versions:
        gradient_log.note(0, version, {"layers.0": torch.full((2,), float(version))})
    return gradient_log


def kept(gradient_log: GradientLog, version: int, *, era: int = 0) -> bool:
    return run(gradient_log.read(era, version, "layers.0", patience_s=0.1)) is not None


def test_nothing_is_kept_while_the_layout_is_not_to_end() -> None:
    gradient_log = GradientLog()
    gradient_log.follow(plan(follows=False))
    noted(5, gradient_log=gradient_log)
    assert not gradient_log.is_wanted
    assert not kept(gradient_log, 5)


def test_a_gradient_is_kept_until_everybody_who_replays_has_asked_for_a_later_one() -> None:
    gradient_log = noted(5)
    gradient_log.wants(OTHER, 6)
    noted(6, 7, 8, gradient_log=gradient_log)
    assert [version for version in (5, 6, 7, 8) if kept(gradient_log, version)] == [6, 7, 8]
    gradient_log.wants(OTHER, 8)
    noted(9, gradient_log=gradient_log)
    assert [version for version in (6, 7, 8, 9) if kept(gradient_log, version)] == [8, 9]


def test_who_fetches_another_layer_still_replays_those_before() -> None:
    gradient_log = noted(5)
    gradient_log.wants(OTHER, 6)
    gradient_log.wants(OTHER, 8, at_least=True)
    noted(6, 7, 8, gradient_log=gradient_log)
    assert kept(gradient_log, 6)


def test_what_is_kept_is_bounded() -> None:
    gradient_log = GradientLog()
    gradient_log.follow(plan())
    gradient_log.wants(OTHER, 1)
    large_N = torch.empty(REPLAYED_BYTES_MAX // 8, device="meta")
    for version in range(1, 3 * TRAIL_STEPS_MIN):
        gradient_log.note(0, version, {"layers.0": large_N})
    assert gradient_log.num_bytes <= TRAIL_STEPS_MIN * 4 * large_N.numel()
    assert kept(gradient_log, 3 * TRAIL_STEPS_MIN - 1)
    assert not kept(gradient_log, 1)


def test_who_asks_for_the_next_step_waits_for_it() -> None:
    gradient_log = noted(5)

    async def main() -> None:
        asking = asyncio.create_task(gradient_log.read(0, 6, "layers.0", patience_s=9.0))
        await asyncio.sleep(1.0)
        assert not asking.done()
        noted(6, gradient_log=gradient_log)
        gradient_N = await asking
        assert gradient_N is not None
        assert gradient_N.tolist() == [6.0, 6.0]

    run(main())


def test_the_last_steps_are_there_until_the_next_layout_is_under_way() -> None:
    gradient_log = noted(5)
    gradient_log.follow(plan(era=1, follows=False, not_started=True))
    assert kept(gradient_log, 5)
    assert not kept(gradient_log, 5, era=1)
    gradient_log.follow(plan(era=1, follows=False))
    assert not kept(gradient_log, 5)


def test_what_is_called_off_leaves_nothing() -> None:
    gradient_log = noted(5)
    gradient_log.follow(plan(follows=False))
    gradient_log.follow(plan())
    assert not kept(gradient_log, 5)
