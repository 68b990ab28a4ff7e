"""What a plan must be to be opened at all: signed, possible, and mandated by nobody but the owner."""

import msgspec
import pytest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.limits import VERSION_MAX
from shoal.protocol.plan import (
    ExpertGroup,
    Foreseen,
    Mandate,
    Member,
    Plan,
    PlanShape,
    Stage,
    open_mandate,
    open_plan,
    plan_flaw,
    sign_mandate,
    sign_plan,
)
from shoal.protocol.wire_format import Formats

OWNER, COORDINATOR, OTHER = (Identity(bytes([number] * 32)) for number in range(3))
RUN = "run"
SHAPE = PlanShape(num_layers=2, activations=("bf16", "int8"), sums=("int8", "hadamard4"))
PLACED = PlanShape(num_layers=2, num_experts=2)

MEMBER, OTHER_MEMBER = (Member(peer=peer.peer_id, share=1.0, bandwidth=1.0) for peer in (COORDINATOR, OTHER))


def mandate_of(signer: Identity, *, run: str = RUN, **says: object) -> bytes:
    usual = {"override_epoch": 1, "term": 7, "coordinator": COORDINATOR.peer_id, "previous": ""}
    return sign_mandate(signer, Mandate(**(usual | says)), run=run)  # type: ignore[arg-type]


def plan_by(identity: Identity, **fields: object) -> Plan:
    member = Member(peer=identity.peer_id, share=1.0, bandwidth=1.0, since=3)
    usual: dict[str, object] = {
        "run": RUN,
        "term": 7,
        "sequence": 4,
        "previous": "",
        "coordinator": identity.peer_id,
        "stages": (Stage(first_layer=0, last_layer=2, members=(member,)),),
    }
    encoded = {field.name: field.encode_name for field in msgspec.structs.fields(Plan)}
    return msgspec.convert({encoded.get(name, name): value for name, value in (usual | fields).items()}, Plan)


def opened(plan: Plan, signer: Identity = COORDINATOR) -> Plan:
    data = sign_plan(signer, plan).envelope
    return open_plan(data, run=RUN, owner=OWNER.peer_id, source=OTHER.peer_id, shape=SHAPE).plan


def test_a_plan_comes_back_as_it_was_signed() -> None:
    foreseen = Foreseen(12_400.0, "reduction", 0)
    plan = plan_by(
        COORDINATOR,
        era=2,
        restore_era=1,
        restore_version=50,
        foreseen=foreseen,
        formats=Formats.same("bf16", "hadamard4", 1),
    )
    assert opened(plan) == plan


def test_a_mandated_plan_comes_back_too() -> None:
    mandate = mandate_of(OWNER)
    opened_one = open_mandate(mandate, run=RUN, owner=OWNER.peer_id, source=OTHER.peer_id)
    assert (opened_one.term, opened_one.coordinator) == (7, COORDINATOR.peer_id)
    plan = plan_by(COORDINATOR, mandate=mandate, override_epoch=1)
    assert opened(plan) == plan


@pytest.mark.parametrize(
    ("mandate", "complaint"),
    [
        (mandate_of(OTHER), "the run's owner did not sign"),
        (mandate_of(COORDINATOR), "the run's owner did not sign"),
        (mandate_of(OWNER, run="another"), "speaks for run 'another'"),
        (mandate_of(OWNER, term=6), "mandate for another"),
        (mandate_of(OWNER, coordinator=OTHER.peer_id), "mandate for another"),
        (mandate_of(OWNER, override_epoch=2), "mandate for another"),
        (mandate_of(OWNER, previous="another"), "mandate for another"),
        (mandate_of(OWNER, era=3, restore_era=2), "does not begin where the owner wants it to"),
        (mandate_of(OWNER, override_epoch=0), "a mandate of override epoch 0"),
        (sign_plan(OWNER, plan_by(OWNER)).envelope, "invalid signature"),
        (b"\x00", "unreadable"),
    ],
    ids=[
        "a stranger's key",
        "its own key",
        "another run",
        "another term",
        "another peer",
        "another override epoch",
        "another base",
        "another era",
        "no override epoch",
        "a signed plan",
        "junk",
    ],
)
def test_a_mandate_that_does_not_hold_is_refused(mandate: bytes, complaint: str) -> None:
    with pytest.raises(RemoteError, match=complaint):
        opened(plan_by(COORDINATOR, mandate=mandate, override_epoch=1))


HALVES = (Stage(0, 1, (MEMBER,)), Stage(1, 2, (OTHER_MEMBER,)))


@pytest.mark.parametrize("cutover_version", [0, 9])
def test_a_plan_may_say_what_follows_and_when_it_ends(cutover_version: int) -> None:
    plan = plan_by(COORDINATOR, spares=(OTHER.peer_id,), cutover_version=cutover_version, next_layout=HALVES)
    assert opened(plan) == plan


@pytest.mark.parametrize(
    ("fields", "flaw"),
    [
        ({"sequence": 2}, "since a later plan"),
        ({"era": 0, "restore_version": 50, "restore_era": 1}, "does not begin"),
        ({"era": 2, "restore_era": 2, "restore_version": 50}, "does not begin"),
        ({"era": 1, "restore_version": -1}, "no run comes to"),
        ({"era": 1 << 63}, "no run comes to"),
        ({"term": 0}, "no run comes to"),
        ({"term": (1 << 64) - 1}, "no run comes to"),
        ({"sequence": (1 << 64) - 1}, "no run comes to"),
        ({"seed": (1 << 64) - 1}, "no run comes to"),
        ({"override_epoch": 1 << 63}, "no run comes to"),
        ({"mandate": b"m"}, "a mandate and no override epoch"),
        ({"stages": ()}, "0 stages"),
        ({"stages": (Stage(0, 1, (MEMBER,)),)}, "it covers 1 of 2 layers"),
        ({"cutover_version": 9}, "it has an end and no following layout"),
        ({"cutover_version": -1, "next_layout": HALVES, "spares": (OTHER.peer_id,)}, "it ends at version -1"),
        ({"cutover_version": VERSION_MAX + 1, "next_layout": HALVES, "spares": (OTHER.peer_id,)}, "it ends at version"),
        (
            {
                "era": 1,
                "restore_version": 9,
                "cutover_version": 8,
                "next_layout": HALVES,
                "spares": (OTHER.peer_id,),
            },
            "it ends at version 8",
        ),
        ({"cutover_version": 9, "next_layout": HALVES}, "one that is no member"),
        ({"cutover_version": 9, "next_layout": (Stage(0, 1, (MEMBER,)), Stage(1, 2, (MEMBER,)))}, "a peer twice"),
        (
            {"cutover_version": 9, "next_layout": (Stage(0, 1, (MEMBER,)),)},
            "following layout is impossible: it covers 1 of 2",
        ),
        (
            {"cutover_version": 9, "next_layout": (Stage(0, 2, ()),)},
            "following layout is impossible: stage 0 has no member",
        ),
        ({"experts": (ExpertGroup(0, 0, (MEMBER,)),)}, "1 groups of experts for 1 stages"),
        ({"spares": ("",)}, "too long, or empty"),
        ({"foreseen": Foreseen(1e3, "commit", 1)}, "foresees that stage 1 bounds it"),
        ({"formats": Formats((), ("bf16",))}, "reductions travel in bf16, the run's in int8 or hadamard4"),
        ({"formats": Formats((), ())}, "0 cuts and 0 reductions have formats, of 1 stages"),
        ({"formats": Formats(("bf16",), ("int8",))}, "1 cuts and 1 reductions have formats, of 1 stages"),
        ({"formats": Formats((), ("int8", "int8"))}, "0 cuts and 2 reductions have formats, of 1 stages"),
        (
            {"stages": HALVES, "spares": (), "formats": Formats(("hadamard4",), ("int8", "hadamard4"))},
            "activations travel in hadamard4, the run's in bf16 or int8",
        ),
        ({"foreseen": Foreseen(0.0, "commit", 0)}, "foresees 0.0 tokens/s"),
        ({"foreseen": Foreseen(float("nan"), "commit", 0)}, "foresees nan tokens/s"),
    ],
)
def test_what_no_plan_can_say(fields: dict[str, object], flaw: str) -> None:
    found = plan_flaw(plan_by(COORDINATOR, **fields), SHAPE)
    assert found is not None
    assert flaw in found
    with pytest.raises(RemoteError, match="impossible plan"):
        opened(plan_by(COORDINATOR, **fields))


def test_who_was_dropped_since_is_gone_or_back_in_its_place() -> None:
    a, b, c, d, e = (PeerID(name) for name in "abcde")
    before = Plan(
        run="r",
        term=1,
        sequence=4,
        previous="",
        coordinator=a,
        stages=(Stage(0, 1, (Member(a, 1, 1, 1), Member(b, 1, 1, 2), Member(c, 1, 1, 3))),),
        spares=(d, e),
    )
    stayed, back = Member(a, 1, 1, 1), Member(b, 1, 1, 6)
    stage = Stage(0, 1, (stayed, back, Member(d, 1, 1, 7)))
    after = msgspec.structs.replace(before, sequence=7, stages=(stage,), spares=(e,))
    assert after.dropped_since(before) == [b, c, e]
    assert [after.has(peer) for peer in (a, c, d, e)] == [True, False, True, True]
    assert (after.stage_of(d), after.since_of(b), after.since_of(e), after.stage_of(e)) == (0, 6, 7, None)


def placed(*experts: ExpertGroup) -> Plan:
    a, b, spare = (Member(PeerID(name), 1.0, 1.0, 4) for name in ("a", "b", "spare"))
    usual = experts or (
        ExpertGroup(0, 0, (a,)),
        ExpertGroup(0, 1, (b, spare)),
        ExpertGroup(1, 0, (a, b)),
        ExpertGroup(1, 1, (spare,)),
    )
    stages = (Stage(0, 1, (a,)), Stage(1, 2, (b,)))
    return plan_by(COORDINATOR, stages=stages, experts=usual, spares=(PeerID("spare"),))


def test_groups_are_stages_then_experts_and_a_peer_may_be_in_several() -> None:
    plan = placed()
    assert plan_flaw(plan, PLACED) is None
    assert [plan.expert_group(stage, expert) for stage in (0, 1) for expert in (0, 1)] == [2, 3, 4, 5]
    assert [plan.groups_of(PeerID(name)) for name in ("a", "b", "spare", "nobody")] == [
        (0, 2, 4),
        (1, 3, 4),
        (3, 5),
        (),
    ]
    assert [member.peer for member in plan.group_members(3)] == ["b", "spare"]
    assert (plan.group_members(6), plan.since_in(PeerID("a"), 4), plan.since_in(PeerID("a"), 5)) == ((), 4, 4)


def test_a_spare_that_holds_an_expert_is_known_to_have_stayed() -> None:
    before, held = placed(), placed().experts
    after = msgspec.structs.replace(before, sequence=9)
    assert after.dropped_since(before) == []
    back = Member(PeerID("spare"), 1.0, 1.0, 8)
    experts = (held[0], ExpertGroup(0, 1, (held[1].members[0], back)), held[2], ExpertGroup(1, 1, (back,)))
    assert msgspec.structs.replace(after, experts=experts).dropped_since(before) == ["spare"]


@pytest.mark.parametrize(
    ("change", "flaw"),
    [
        (lambda held: held[:3], "3 groups of experts for 2 stages"),
        (lambda held: held[:2], "2 groups of experts for 2 stages"),
        (lambda held: (held[1], held[0], *held[2:]), "not in its place"),
        (lambda held: (ExpertGroup(0, 0, ()), *held[1:]), "has no member"),
        (lambda held: (ExpertGroup(0, 0, (Member(PeerID("stranger"), 1.0, 1.0),)), *held[1:]), "no member"),
        (lambda held: (ExpertGroup(0, 0, held[0].members * 2), *held[1:]), "by a peer twice"),
        (lambda held: (ExpertGroup(0, 0, (Member(PeerID("a"), 0.0, 1.0),)), *held[1:]), "not a positive number"),
    ],
)
def test_what_no_placement_of_experts_can_be(change, flaw: str) -> None:  # type: ignore[no-untyped-def]
    found = plan_flaw(placed(*change(placed().experts)), PLACED)
    assert found is not None
    assert flaw in found
