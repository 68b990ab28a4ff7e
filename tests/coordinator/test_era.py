import pytest

from shoal.coordinator.era import (
    MISSING_HEARTBEATS,
    PATIENCE_HEARTBEATS,
    CheckpointCatalog,
    HolderWatch,
    holders,
    is_last_holder,
)
from shoal.coordinator.roster import Roster
from shoal.protocol.messages import Holding
from shoal.protocol.plan import ExpertGroup, Member
from shoal.protocol.spec import ModelSpec

LAYERS = ("embed", "layers.0", "layers.1", "head")


def held(era, version, *layers):
    return Holding(era=era, version=version, layers=layers)


def catalog(**holdings):
    return CheckpointCatalog.of(holdings.items())


def test_a_snapshot_is_whole_when_every_layer_is_somewhere():
    apart = catalog(a=[held(0, 50, "embed", "layers.0")], b=[held(0, 50, "layers.1", "head")])
    assert apart.newest_whole(LAYERS) == (0, 50)
    assert catalog(a=[held(0, 50, "embed", "layers.0")], b=[held(0, 50, "head")]).newest_whole(LAYERS) is None


def test_layers_of_two_versions_or_two_eras_make_no_snapshot():
    assert catalog(a=[held(0, 50, *LAYERS[:2])], b=[held(0, 60, *LAYERS[2:])]).newest_whole(LAYERS) is None
    assert catalog(a=[held(0, 50, *LAYERS[:2])], b=[held(1, 50, *LAYERS[2:])]).newest_whole(LAYERS) is None


def test_the_newest_is_of_the_last_era_and_then_the_last_version():
    found = catalog(a=[held(0, 90, *LAYERS), held(1, 60, *LAYERS), held(1, 55, *LAYERS)], b=[held(1, 70, "embed")])
    assert found.newest_whole(LAYERS) == (1, 60)
    assert found.era_max == 1


def test_parts_of_one_peers_snapshot_add_up():
    found = catalog(a=[held(0, 50, *LAYERS[:2]), held(0, 50, *LAYERS[2:])])
    assert found.newest_whole(LAYERS) == (0, 50)


def test_a_snapshot_is_safe_when_every_layer_is_on_two_disks():
    one, other = LAYERS[:2], LAYERS[2:]
    old = [held(0, 40, *LAYERS)]
    found = catalog(a=[*old, held(0, 50, *one)], b=[*old, held(0, 50, *other)], c=[held(0, 50, *one)])
    assert found.newest_whole(LAYERS) == (0, 50)
    assert found.newest_safe(LAYERS) == (0, 40)
    found = catalog(a=[*old, held(0, 50, *LAYERS)], b=[*old, held(0, 50, *other)], c=[held(0, 50, *one)])
    assert found.newest_safe(LAYERS) == (0, 50)
    assert catalog(a=[held(0, 50, *one), held(0, 50, *LAYERS)]).newest_safe(LAYERS) is None, "twice on one disk is once"


def test_what_no_era_can_be_is_not_believed():
    assert catalog(a=[held(1 << 63, 50, *LAYERS), held(-1, 50, *LAYERS)]).era_max == -1


def test_version_0_is_the_seeds_and_no_disk_is_an_answer():
    assert catalog(a=[held(0, 0, *LAYERS)]).newest_whole(LAYERS) is None
    assert catalog().newest_whole(LAYERS) is None
    assert catalog().era_max == -1


ABC = [["a", "d"], ["b", "e"], ["c", "f"]]
ALL = [frozenset(group) for group in ABC]


@pytest.fixture
def plan(make_plan):
    return make_plan(ABC, coordinator="a").plan


def without(stage):
    return [frozenset() if index == stage else holders for index, holders in enumerate(ALL)]


def test_a_stage_whose_holders_may_be_back_is_waited_for(plan):
    watch = HolderWatch(2.0, 0.0)
    assert watch.lost(plan, ALL, "abcdef", 10.0) == ()
    assert watch.lost(plan, without(1), "abcdef", 10.0 + 2 * PATIENCE_HEARTBEATS - 0.1) == ()
    assert watch.lost(plan, without(1), "abcdef", 10.0 + 2 * PATIENCE_HEARTBEATS) == (1,)


def test_the_dead_are_not_waited_for(plan):
    watch = HolderWatch(2.0, 0.0)
    watch.lost(plan, ALL, "abcdef", 10.0)
    assert watch.lost(plan, without(1), "acdef", 10.1) == (), "one of them lives"
    assert watch.lost(plan, without(1), "acdf", 10.2) == (1,)


def test_a_mate_that_never_had_the_state_cannot_bring_it_back(plan):
    watch = HolderWatch(2.0, 0.0)
    watch.lost(plan, [ALL[0], frozenset("b"), ALL[2]], "abcdef", 10.0)
    assert watch.lost(plan, without(1), "acdef", 10.1) == (1,)


def test_who_comes_to_coordinate_gives_everybody_time(plan):
    watch = HolderWatch(2.0, 100.0)
    assert watch.lost(plan, [frozenset()] * 3, "abcdef", 100.0) == ()
    assert watch.lost(plan, [frozenset()] * 3, "abcdef", 106.0) == (0, 1, 2)


def test_disks_that_are_away_are_waited_for_once_it_is_lost(plan):
    watch = HolderWatch(2.0, 0.0)
    assert watch.lost(plan, without(1), "acdf", 50.0) == (1,)
    assert not watch.is_hopeless(50.0)
    assert not watch.is_hopeless(49.9 + 2 * MISSING_HEARTBEATS)
    assert watch.is_hopeless(50.0 + 2 * MISSING_HEARTBEATS)
    watch.lost(plan, ALL, "abcdef", 120.0)
    assert not watch.is_hopeless(121.0), "found, and lost again: that counts anew"


def test_a_wait_ends_a_little_after_it_is_known_to_be_in_vain(plan):
    watch = HolderWatch(2.0, 0.0)
    watch.lost(plan, without(1), "acdf", 50.0)
    assert not watch.is_waiting(50.0), "as long as there is a whole snapshot nobody asks whether it is hopeless"
    watch.is_hopeless(50.0)
    assert watch.is_waiting(50.0)
    hopeless_s = 50.0 + 2 * MISSING_HEARTBEATS
    assert watch.is_hopeless(hopeless_s)
    assert watch.is_waiting(hopeless_s)
    assert not watch.is_waiting(hopeless_s + 2 * PATIENCE_HEARTBEATS)
    watch.lost(plan, ALL, "abcdef", 60.0)
    assert not watch.is_waiting(60.0)


class Once(tuple):
    """May be read through once."""

    def __new__(cls, *held):
        new = super().__new__(cls, held)
        new.times = 0
        return new

    def __iter__(self):
        self.times += 1
        assert self.times == 1
        return super().__iter__()


def test_who_holds_what_is_read_from_each_heartbeat_once(make_plan, make_heartbeat):
    """Groups 0 to 2 are the stages, 3 and 4 the experts of stage 0, and so on."""
    experts = tuple(
        ExpertGroup(stage, expert, tuple(Member(peer, 1.0, 1.0) for peer in group))
        for stage, group in enumerate(ABC)
        for expert in range(2)
    )
    live = make_plan(ABC, coordinator="a", experts=experts, era=1, restore_version=50, restore_era=0).plan
    beats = {
        "a": {"stage": 0, "version": 57, "synced": True, "held": Once((3, 57), (4, 49), (1, 57))},
        "d": {"stage": 0, "version": 57, "synced": False, "held": Once((3, 50))},
        "b": {"stage": 1, "version": 49, "synced": True, "held": Once((6, 50), (99, 50), (-1, 50))},
        "c": {"stage": 2, "version": 57, "synced": True, "held": Once((8, 57)), "era": 0},
        "f": {"stage": 3, "version": 57, "synced": True, "held": Once()},
    }
    roster = Roster(1.0)
    for peer, says in beats.items():
        roster.heard(peer, make_heartbeat(peer, **({"era": 1} | says)), 0.0)
    model = ModelSpec(num_experts=2)
    found = holders(live, roster, catalog(), model, not_started=False, now_s=0.5)
    assert ["".join(sorted(group)) for group in found] == ["a", "", "", "ad", "", "", "b", "", ""]


def test_who_alone_holds_a_state_is_known(plan):
    assert not is_last_holder("b", plan, ALL)
    assert is_last_holder("b", plan, [ALL[0], frozenset("b"), ALL[2]]), "its mate still fetches it"
    assert not is_last_holder("e", plan, [ALL[0], frozenset("b"), ALL[2]])
    assert not is_last_holder("b", plan, without(1)), "nobody has said yet who holds it"


def test_a_lone_member_holds_alone_even_if_nobody_has_said_so(make_plan):
    lone = make_plan([["a", "d"], ["b"], ["c", "f"]], coordinator="a").plan
    assert is_last_holder("b", lone, [frozenset()] * 3)
