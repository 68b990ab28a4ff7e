"""What a peer keeps of a layout that ends, and for how long."""

import torch

from shoal.peer.handoff.retained import RetainedLayers
from shoal.peer.model.state import LayerState
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Holding
from shoal.protocol.plan import Member, Plan, Stage

ME = PeerID("me")
LAYER = LayerState(param_N=torch.zeros(1), moment1_N=torch.zeros(1), moment2_N=torch.zeros(1))
STAGES = (Stage(0, 2, (Member(ME, 1.0, 1.0),)),)


def plan(
    sequence: int, *, era: int = 0, cutover_version: int = 0, not_started: bool = False, restore_version: int = 0
) -> Plan:
    return Plan(
        run="r",
        term=1,
        sequence=sequence,
        previous="",
        coordinator=ME,
        stages=STAGES,
        era=era,
        not_started=not_started,
        restore_era=max(0, era - 1),
        restore_version=restore_version,
        cutover_version=cutover_version,
        next_layout=STAGES if cutover_version else (),
    )


def test_only_the_version_at_which_the_layout_ends_is_carried() -> None:
    carried = RetainedLayers()
    carried.take(plan(1), 5, {"layer0": LAYER})
    carried.take(plan(2, cutover_version=7), 6, {"layer0": LAYER})
    assert carried.holding is None
    carried.take(plan(2, cutover_version=7), 7, {"layer0": LAYER})
    carried.take(plan(2, cutover_version=7), 7, {"layer1": LAYER})
    assert carried.holding == Holding(era=0, version=7, layers=("layer0", "layer1"))
    assert list(carried.read(0, 7)) == ["layer0", "layer1"]
    assert carried.read(0, 6) == carried.read(1, 7) == {}


def test_it_is_carried_until_the_next_layout_is_under_way() -> None:
    carried = RetainedLayers()
    carried.take(plan(2, cutover_version=7), 7, {"layer0": LAYER})
    carried.follow(plan(3, cutover_version=7))
    carried.follow(plan(4, era=1, not_started=True, restore_version=7))
    assert carried.holding is not None, "others may still have to fetch it"
    carried.follow(plan(5, era=1, restore_version=7))
    assert carried.holding is None


def test_a_layout_that_does_not_end_after_all_leaves_nothing() -> None:
    carried = RetainedLayers()
    carried.take(plan(2, cutover_version=7), 7, {"layer0": LAYER})
    carried.follow(plan(3, cutover_version=20))
    assert carried.holding is None
