"""The plan's groups of experts: complete, stable while nothing happens, and where the load is."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from shoal.coordinator.experts.groups import LOOK_STEPS, ExpertPlaces
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Advert, Heartbeat
from shoal.protocol.plan import ExpertGroup, Member, Plan, PlanShape, Stage, plan_flaw

E = 8


def names(count: int, *, first: int = 0) -> tuple[PeerID, ...]:
    return tuple(PeerID(f"p{number:02}") for number in range(first, first + count))


def stages(*groups: tuple[PeerID, ...]) -> tuple[Stage, ...]:
    return tuple(Stage(i, i + 1, tuple(Member(p, 1.0, 1.0, 1) for p in peers)) for i, peers in enumerate(groups))


def planned(places: ExpertPlaces, groups: tuple[Stage, ...], before: Plan | None = None, *, sequence: int = 1) -> Plan:
    plan = Plan(
        run="r",
        term=1,
        sequence=sequence,
        previous="",
        coordinator=groups[0].peers[0],
        stages=groups,
        experts=places.place(groups, before, sequence=sequence),
    )
    assert plan_flaw(plan, PlanShape(num_layers=groups[-1].last_layer, num_experts=E)) is None
    return plan


def beat(stage: int, loads: tuple[int, ...]) -> Heartbeat:
    advert = Advert(
        name="p",
        device="cpu",
        flop_per_s=1.0,
        memory_bytes=1,
        upload_bytes_per_s=1.0,
        download_bytes_per_s=1.0,
        addresses=(),
        has_data=True,
    )
    return Heartbeat(
        advert=advert,
        plan_sequence=1,
        plan_digest="",
        stage=stage,
        version=0,
        synced=True,
        draining=False,
        loads=loads,
    )


def holders(plan: Plan, stage: int) -> list[int]:
    return [len(entry.members) for entry in plan.experts if entry.stage == stage]


def test_without_slots_nothing_is_placed() -> None:
    assert ExpertPlaces(num_experts=E, slots=0).place(stages(names(3)), None, sequence=1) == ()


@pytest.mark.parametrize("min_replicas", [1, 2, 3])
@pytest.mark.parametrize(("peers", "slots"), [(1, 1), (2, 3), (3, 4), (6, 3), (5, 8)])
def test_every_expert_of_every_stage_has_holders_among_its_members(peers: int, slots: int, min_replicas: int) -> None:
    both = stages(names(peers), names(peers, first=peers))
    plan = planned(ExpertPlaces(num_experts=E, slots=slots, min_replicas=min_replicas), both)
    assert len(plan.experts) == 2 * E
    for entry in plan.experts:
        assert set(entry.peers) <= set(both[entry.stage].peers)
    promised = min(peers, min_replicas)
    assert min(holders(plan, 0)) >= promised
    needed = -(-E * promised // peers)
    held = [sum(peer in entry.peers for entry in plan.experts) for peer in both[0].peers]
    assert max(held) <= max(slots, needed), "who has room for what is promised takes no more than it was told"


def test_one_death_after_another_loses_nothing_while_two_are_left() -> None:
    """Slots for one copy each and a half, as three members of the demo would have; each time the lost are copied."""
    places = ExpertPlaces(num_experts=E, slots=4)
    left = names(4)
    plan = planned(places, stages(left))
    while len(left) > 1:
        held = [set(entry.peers) for entry in plan.experts]
        assert all(len(peers) >= 2 for peers in held)
        left = left[1:]
        assert all(peers.intersection(left) for peers in held)
        plan = planned(places, stages(left), plan, sequence=plan.sequence + 1)


def test_while_nothing_happens_nobody_moves() -> None:
    places = ExpertPlaces(num_experts=E, slots=3)
    plan = planned(places, stages(names(6)))
    later = planned(places, plan.stages, plan, sequence=9)
    assert later.experts == plan.experts
    another = planned(ExpertPlaces(num_experts=E, slots=3), plan.stages, plan, sequence=9)
    assert another.experts == plan.experts, "a coordinator that has measured nothing yet moves nobody"


@pytest.mark.parametrize(("members", "num_slots"), [(4, 6), (5, 13), (7, 12), (8, 15)])
def test_nobody_moves_where_members_hold_an_expert_twice(members: int, num_slots: int) -> None:
    """A plan does not say who holds what twice, and twice is what keeps a hot expert's replicas from being too busy."""
    places = ExpertPlaces(num_experts=E, slots=num_slots)
    places.take_over([[1.0 / (1 + expert) for expert in range(E)]])
    plan = first = planned(places, stages(names(members)))
    for look in range(2, 12):
        plan = planned(places, plan.stages, plan, sequence=look)
        assert plan.experts == first.experts


def test_who_stays_keeps_its_place_when_another_dies() -> None:
    places = ExpertPlaces(num_experts=E, slots=4)
    plan = planned(places, stages(names(6)))
    left = stages(names(5))
    after = planned(places, left, plan, sequence=2)
    kept = [
        (entry.expert, member.peer)
        for entry, before in zip(after.experts, plan.experts, strict=True)
        for member in entry.members
        if member.peer in before.peers
    ]
    assert len(kept) >= 12, "most of the twenty slots stay as they were"
    assert all(after.since_in(peer, 1 + expert) == 1 for expert, peer in kept)
    moved = [m for entry in after.experts for m in entry.members if (entry.expert, m.peer) not in kept]
    assert all(member.since == 2 for member in moved)


def test_a_hot_expert_keeps_nobody_busier_than_others_and_the_look_is_not_taken_at_every_step() -> None:
    places = ExpertPlaces(num_experts=E, slots=5)
    plan = planned(places, stages(names(6)))
    counts = [0] * E
    for _ in range(20):
        for peer in names(6):
            counts = [count + (700 if expert == 5 else 100) for expert, count in enumerate(counts)]
            places.hear(peer, beat(0, tuple(counts)))
    after = planned(places, plan.stages, plan, sequence=2)
    assert holders(after, 0)[5] == max(holders(after, 0))

    def busiest(groups: tuple[ExpertGroup, ...]) -> float:
        """The largest part of all tokens that one member gets."""
        parts = dict.fromkeys(names(6), 0.0)
        for entry, load in zip(groups, places.load_shares(0), strict=True):
            for member in entry.members:
                parts[member.peer] += load * member.share / sum(other.share for other in entry.members)
        return max(parts.values())

    assert busiest(after.experts) < min(0.9 * busiest(plan.experts), 1.1 / 6)
    assert not places.is_due(plan, LOOK_STEPS - 1)
    assert places.is_due(plan, LOOK_STEPS)
    assert not places.is_due(plan, LOOK_STEPS + 1)
    assert places.is_due(msgspec.structs.replace(plan, era=1), LOOK_STEPS + 1), "another era begins anew"


def shares_of(plan: Plan) -> list[dict[PeerID, float]]:
    return [{member.peer: member.share for member in entry.members} for entry in plan.experts]


def measured(places: ExpertPlaces) -> None:
    """Half of all tokens want expert 5."""
    for beats in (0, 1):
        for peer in names(6):
            places.hear(peer, beat(0, tuple(beats * (700 if expert == 5 else 100) for expert in range(E))))


def test_who_takes_over_without_a_word_leaves_the_shares_as_they_are() -> None:
    places = ExpertPlaces(num_experts=E, slots=5)
    measured(places)
    plan = planned(places, stages(names(6)))
    heir = ExpertPlaces(num_experts=E, slots=5)
    assert shares_of(planned(heir, plan.stages, plan, sequence=2)) == shares_of(plan)
    assert planned(heir, plan.stages, plan, sequence=2).experts == plan.experts


def test_who_takes_over_with_a_word_plans_by_what_was_measured() -> None:
    places, heir = (ExpertPlaces(num_experts=E, slots=5) for _ in range(2))
    measured(places)
    before = planned(places, stages(names(6)))
    heir.take_over(places.loads(1))
    assert heir.load_shares(0) == places.load_shares(0)
    dead = stages(names(5))
    assert planned(heir, dead, before, sequence=2).experts == planned(places, dead, before, sequence=2).experts


def test_what_was_sent_while_others_coordinated_is_nothing_of_now() -> None:
    places = ExpertPlaces(num_experts=E, slots=3)
    peer = PeerID("p00")
    places.hear(peer, beat(0, (0,) * E))
    places.hear(peer, beat(0, (100,) * E))
    places.rest()
    assert places.load_shares(0) == [0.0] * E, "who takes over from the dead knows nothing"
    places.take_over([[1.0] * E])
    places.hear(peer, beat(0, (100_000,) + (200,) * (E - 1)))
    assert places.load_shares(0) == pytest.approx([1 / E] * E)


def cut(bounds: tuple[int, ...], *groups: tuple[PeerID, ...]) -> tuple[Stage, ...]:
    """Stages whose layers begin at `bounds`, the last of which is where the model ends."""
    return tuple(
        Stage(first, last, tuple(Member(p, 1.0, 1.0, 1) for p in peers))
        for (first, last), peers in zip(pairwise(bounds), groups, strict=True)
    )


def divided(places: ExpertPlaces, plan: Plan, into: tuple[Stage, ...], *, sequence: int) -> Plan:
    experts = places.place(into, plan, sequence=sequence, begins=True)
    return msgspec.structs.replace(
        plan, sequence=sequence, era=1, not_started=True, stages=into, spares=(), experts=experts, previous="x"
    )


def held_by(plan: Plan, peer: PeerID) -> set[tuple[int, int]]:
    """(layer, expert)."""
    return {
        (layer, entry.expert)
        for entry in plan.experts
        if peer in entry.peers
        for layer in range(*plan.stages[entry.stage].layers)
    }


def fetched(plan: Plan, before: Plan) -> int:
    """How many experts of a layer members come to hold."""
    return sum(len(held_by(plan, peer) - held_by(before, peer)) for peer in plan.members)


def test_experts_follow_layers_that_come_to_other_stages() -> None:
    """Members of a stage hold what they had of its layers: only of what comes from elsewhere they fetch anything."""
    six = names(6)
    places = ExpertPlaces(num_experts=E, slots=4)
    before = planned(places, cut((0, 3, 6), six[:3], six[3:]))
    places.obey(before)
    after = divided(places, before, cut((0, 2, 6), six[:3], six[3:]), sequence=2)
    assert plan_flaw(after, PlanShape(num_layers=6, num_experts=E)) is None
    assert min(holders(after, 0) + holders(after, 1)) >= 2
    assert all(entry.peers == then.peers for entry, then in zip(after.experts, before.experts, strict=True))
    assert fetched(after, before) == sum(len(entry.members) for entry in after.experts if entry.stage == 1)
    assert all(member.since == 2 for entry in after.experts for member in entry.members)


def test_stages_that_are_joined_keep_their_holders() -> None:
    six = names(6)
    places = ExpertPlaces(num_experts=E, slots=4)
    before = planned(places, cut((0, 2, 4, 6), six[:2], six[2:4], six[4:]))
    places.obey(before)
    after = divided(places, before, cut((0, 6), six), sequence=2)
    anew = divided(ExpertPlaces(num_experts=E, slots=4), before, cut((0, 6), six), sequence=2)
    assert min(holders(after, 0)) >= 2
    for peer in six:
        had = {expert for _, expert in held_by(before, peer)}
        has = {expert for _, expert in held_by(after, peer)}
        assert has <= had, "who had eight of two layers has four of six, and none that it had not"
    assert fetched(after, before) <= fetched(anew, before)


def test_a_stage_that_is_cut_leaves_each_member_its_experts() -> None:
    four = names(4)
    places = ExpertPlaces(num_experts=E, slots=4)
    before = planned(places, cut((0, 6), four))
    places.obey(before)
    after = divided(places, before, cut((0, 3, 6), four[:2], four[2:]), sequence=2)
    assert holders(after, 0) == holders(after, 1) == [2] * E, "two members hold all, as is promised"
    for peer in four:
        kept = {expert for _, expert in held_by(before, peer)}
        assert kept <= {expert for _, expert in held_by(after, peer)}


def test_layers_take_their_loads_along() -> None:
    places = ExpertPlaces(num_experts=E, slots=4)
    six = names(6)
    first = planned(places, cut((0, 2, 6), six[:3], six[3:]))
    places.obey(first)
    places.take_over([[8.0] + [0.0] * (E - 1), [0.0, 4.0] + [0.0] * (E - 2)])
    places.obey(divided(places, first, cut((0, 4, 6), six[:3], six[3:]), sequence=2))
    assert places.loads(2)[0] == pytest.approx([8.0, 2.0] + [0.0] * (E - 2))
    assert places.loads(2)[1] == pytest.approx([0.0, 2.0] + [0.0] * (E - 2))


def test_what_a_peer_counts_for_its_new_stage_begins_at_zero() -> None:
    places = ExpertPlaces(num_experts=E, slots=4)
    four = names(4)
    first = planned(places, cut((0, 3, 6), four[:2], four[2:]))
    places.obey(first)
    places.hear(four[0], beat(0, (100,) * E))
    places.obey(divided(places, first, cut((0, 6), four), sequence=2))
    places.hear(four[0], beat(0, (150,) + (100,) * (E - 1)))
    assert places.load_shares(0) == [0.0] * E, "its first word is where it counts from"


def test_a_stranger_that_comes_back_begins_anew() -> None:
    places = ExpertPlaces(num_experts=E, slots=3)
    stays, goes = names(2)
    for peer in (stays, goes):
        places.hear(peer, beat(0, (100,) * E))
    places.forget_strangers({stays})
    places.hear(goes, beat(0, (100_000,) + (100,) * (E - 1)))
    assert places.load_shares(0) == [0.0] * E
    places.hear(stays, beat(0, (100, 108) + (100,) * (E - 2)))
    assert places.load_shares(0) == [0.0, 1.0] + [0.0] * (E - 2)


def test_a_word_that_cannot_be_is_not_taken() -> None:
    places = ExpertPlaces(num_experts=E, slots=3)
    for counts in ((1.0,) * (E - 1), (float("nan"),) * E, (float("inf"),) * E, (-1.0,) * E):
        places.take_over((counts,))
    assert places.load_shares(0) == [0.0] * E
    assert ExpertPlaces(num_experts=E, slots=0).loads(2) == ()
    assert places.loads(2) == ((), ())


def test_the_load_is_told_as_shares() -> None:
    places = ExpertPlaces(num_experts=E, slots=3)
    assert places.load_shares(0) == [0.0] * E
    places.hear(PeerID("p00"), beat(0, (0,) * E))
    places.hear(PeerID("p00"), beat(0, (30, 10) + (0,) * (E - 2)))
    assert places.load_shares(0) == [0.75, 0.25] + [0.0] * (E - 2)
    assert places.load_shares(1) == [0.0] * E


def test_nonsense_is_not_measured() -> None:
    places, usual = ExpertPlaces(num_experts=E, slots=3), ExpertPlaces(num_experts=E, slots=3)
    for loads in ((), (1,) * (E + 1), (-1,) * E, (1 << 60,) * E):
        places.hear(PeerID("liar"), beat(0, loads))
    places.hear(PeerID("liar"), beat(10**6, (1,) * E))
    assert replace(places) == replace(usual)
