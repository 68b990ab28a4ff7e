import pytest

from shoal.coordinator.era import MISSING_HEARTBEATS, PATIENCE_HEARTBEATS, Disks, HolderWatch, is_last_holder
from shoal.protocol.messages import Holding

LAYERS = ("embed", "layers.0", "layers.1", "head")


def held(era, version, *layers):
    return Holding(era=era, version=version, layers=layers)


def disks(**holdings):
    return Disks.of(holdings.items())


def test_a_snapshot_is_whole_when_every_layer_is_somewhere():
    apart = disks(a=[held(0, 50, "embed", "layers.0")], b=[held(0, 50, "layers.1", "head")])
    assert apart.newest_whole(LAYERS) == (0, 50)
    assert disks(a=[held(0, 50, "embed", "layers.0")], b=[held(0, 50, "head")]).newest_whole(LAYERS) is None


def test_layers_of_two_versions_or_two_eras_make_no_snapshot():
    assert disks(a=[held(0, 50, *LAYERS[:2])], b=[held(0, 60, *LAYERS[2:])]).newest_whole(LAYERS) is None
    assert disks(a=[held(0, 50, *LAYERS[:2])], b=[held(1, 50, *LAYERS[2:])]).newest_whole(LAYERS) is None


def test_the_newest_is_of_the_last_era_and_then_the_last_version():
    found = disks(a=[held(0, 90, *LAYERS), held(1, 60, *LAYERS), held(1, 55, *LAYERS)], b=[held(1, 70, "embed")])
    assert found.newest_whole(LAYERS) == (1, 60)
    assert found.era_max == 1


def test_parts_of_one_peers_snapshot_add_up():
    found = disks(a=[held(0, 50, *LAYERS[:2]), held(0, 50, *LAYERS[2:])])
    assert found.newest_whole(LAYERS) == (0, 50)
    assert found.has("a", (0, 50), LAYERS)
    assert not found.has("b", (0, 50), LAYERS[:1])


def test_what_no_era_can_be_is_not_believed():
    assert disks(a=[held(1 << 63, 50, *LAYERS), held(-1, 50, *LAYERS)]).era_max == -1


def test_version_0_is_the_seeds_and_no_disk_is_an_answer():
    assert disks(a=[held(0, 0, *LAYERS)]).newest_whole(LAYERS) is None
    assert disks().newest_whole(LAYERS) is None
    assert disks().era_max == -1


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


def test_who_alone_holds_a_state_is_known(plan):
    assert not is_last_holder("b", plan, ALL)
    assert is_last_holder("b", plan, [ALL[0], frozenset("b"), ALL[2]]), "its mate still fetches it"
    assert not is_last_holder("e", plan, [ALL[0], frozenset("b"), ALL[2]])
    assert not is_last_holder("b", plan, without(1)), "nobody has said yet who holds it"


def test_a_lone_member_holds_alone_even_if_nobody_has_said_so(make_plan):
    lone = make_plan([["a", "d"], ["b"], ["c", "f"]], coordinator="a").plan
    assert is_last_holder("b", lone, [frozenset()] * 3)
