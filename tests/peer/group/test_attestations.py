"""Who must have signed a state before a newcomer fetches it."""

from shoal.peer.replica.attestations import Attestations, is_majority, voters
from shoal.protocol.certificate import root_of, state_body
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import ATTESTATIONS_OF_ONE_MAX
from shoal.protocol.plan import Member

A, B, C, D, E = (PeerID(name) for name in "abcde")
PROOFS = (("layers.0", "1"), ("layers.1", "2"))


def members(**since: int) -> list[Member]:
    return [Member(PeerID(peer), 1.0, 1.0, at) for peer, at in since.items()]


def test_who_held_the_layers_before_votes_and_who_comes_at_the_same_time_does_not() -> None:
    group = members(a=1, b=1, c=2, d=2)
    assert voters(group, D, reported_empty=(), draining=()) == (A, B)


def test_who_begins_anew_in_its_old_place_is_told_by_those_of_its_time() -> None:
    assert voters(members(a=1, b=1, c=2), B, reported_empty=(), draining=()) == (A,)


def test_who_begins_anew_and_is_the_eldest_is_told_by_those_who_came_later() -> None:
    group = members(a=0, b=2, c=3)
    assert voters(group, A, reported_empty=(), draining=()) == (B, C)
    assert voters(group, A, reported_empty=(B,), draining=()) == (C,)
    assert voters(group, A, reported_empty=(), draining=(D,)) == (D,), "who drains held the layers before"
    assert voters(group, C, reported_empty=(A, B), draining=()) == ()


def test_who_says_that_it_has_no_state_is_not_waited_for() -> None:
    assert voters(members(a=1, b=1, c=2), C, reported_empty=(B,), draining=()) == (A,)


def test_where_nobody_of_the_plan_has_the_state_those_who_drain_have_it() -> None:
    assert voters(members(a=2, b=2), A, reported_empty=(B,), draining=(D, E)) == (D, E)
    assert voters(members(a=2), A, reported_empty=(), draining=(D,)) == (D,)
    assert voters(members(a=2), A, reported_empty=(), draining=()) == ()


def test_half_is_no_majority_and_nobody_is_none() -> None:
    assert [is_majority(num, (A, B)) for num in (1, 2)] == [False, True]
    assert [is_majority(num, (A, B, C)) for num in (1, 2)] == [False, True]
    assert not is_majority(0, ())


def test_a_root_depends_on_each_layer_its_name_and_their_order() -> None:
    changed = ((("layers.0", "1"), ("layers.1", "3")), (("layers.0", "1"), ("layers.2", "2")), PROOFS[::-1], PROOFS[:1])
    assert len({root_of(proofs) for proofs in (PROOFS, *changed)}) == 5


def test_a_statement_is_of_one_era_and_version() -> None:
    bodies = {state_body(era=era, version=version, root="r") for era in (0, 1) for version in (0, 1)}
    assert len(bodies) == 4


def test_who_has_signed_another_root_is_no_witness_of_this_one() -> None:
    said = Attestations()
    said.heard(A, 5, "root", b"a")
    said.heard(B, 5, "other", b"b")
    said.heard(C, 6, "root", b"c")
    assert said.signers(5, "root") == {A: b"a"}


def test_of_one_holder_a_few_versions_are_kept() -> None:
    said = Attestations()
    for version in range(10 * ATTESTATIONS_OF_ONE_MAX):
        said.heard(A, version, "root", b"a")
    assert len(said._said) == ATTESTATIONS_OF_ONE_MAX
    assert said.signers(version, "root") == {A: b"a"}
