"""What a plan must be to be opened at all: signed, possible, and mandated by nobody but the owner."""

import msgspec
import pytest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.plan import Member, Plan, Stage, open_mandate, open_plan, plan_flaw, sign_mandate, sign_plan

OWNER, COORDINATOR, OTHER = (Identity(bytes([number] * 32)) for number in range(3))
RUN = "run"


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
    return msgspec.convert(usual | fields, Plan)


def opened(plan: Plan, signer: Identity = COORDINATOR) -> Plan:
    data = sign_plan(signer, plan).envelope
    return open_plan(data, run=RUN, owner=OWNER.peer_id, source=OTHER.peer_id, num_layers=2).plan


def test_a_plan_comes_back_as_it_was_signed() -> None:
    plan = plan_by(COORDINATOR, era=2, restore_era=1, restore_version=50)
    assert opened(plan) == plan


def test_a_mandated_plan_comes_back_too() -> None:
    mandate = sign_mandate(OWNER, run=RUN, term=7, coordinator=COORDINATOR.peer_id)
    assert open_mandate(mandate, run=RUN, owner=OWNER.peer_id, source=OTHER.peer_id) == (7, COORDINATOR.peer_id)
    plan = plan_by(COORDINATOR, mandate=mandate)
    assert opened(plan) == plan


@pytest.mark.parametrize(
    ("mandate", "complaint"),
    [
        (sign_mandate(OTHER, run=RUN, term=7, coordinator=COORDINATOR.peer_id), "the run's owner did not sign"),
        (sign_mandate(COORDINATOR, run=RUN, term=7, coordinator=COORDINATOR.peer_id), "the run's owner did not sign"),
        (sign_mandate(OWNER, run="another", term=7, coordinator=COORDINATOR.peer_id), "speaks for run 'another'"),
        (sign_mandate(OWNER, run=RUN, term=6, coordinator=COORDINATOR.peer_id), "mandate for another"),
        (sign_mandate(OWNER, run=RUN, term=7, coordinator=OTHER.peer_id), "mandate for another"),
        (sign_plan(OWNER, plan_by(OWNER)).envelope, "signature does not hold"),
        (b"\x00", "unreadable"),
    ],
    ids=["a stranger's key", "its own key", "another run", "another term", "another peer", "a signed plan", "junk"],
)
def test_a_mandate_that_does_not_hold_is_refused(mandate: bytes, complaint: str) -> None:
    with pytest.raises(RemoteError, match=complaint):
        opened(plan_by(COORDINATOR, mandate=mandate))


@pytest.mark.parametrize(
    ("fields", "flaw"),
    [
        ({"sequence": 2}, "since a plan to come"),
        ({"era": 0, "restore_version": 50, "restore_era": 1}, "does not begin"),
        ({"era": 2, "restore_era": 2, "restore_version": 50}, "does not begin"),
        ({"era": 1, "restore_version": -1}, "does not begin"),
    ],
)
def test_what_no_plan_can_say(fields: dict[str, object], flaw: str) -> None:
    found = plan_flaw(plan_by(COORDINATOR, **fields), num_layers=2)
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
