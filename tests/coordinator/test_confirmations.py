"""One peer's word moves nothing; a majority of those who hold a state does, and of all members for the run's end."""

import pytest

from shoal.coordinator.ledger import Confirmations, proves_end


@pytest.fixture
def plan(make_plan):
    return make_plan([["a", "b", "c"], ["d", "e"], ["f"]], coordinator="a").plan


@pytest.fixture
def confirmations(plan):
    confirmations = Confirmations()
    confirmations.obey(plan)
    return confirmations


def test_a_version_counts_once_most_of_its_holders_have_it(confirmations):
    for peer, version in [("a", 7), ("b", 5), ("c", 100_000)]:
        confirmations.note(peer, 0, version, holds=True)
    assert confirmations.version(0) == 7
    confirmations.note("d", 1, 9, holds=True)
    assert confirmations.version(1) == 9, "the other one is still fetching, and nobody waits for it"
    confirmations.note("e", 1, 3, holds=True)
    assert confirmations.version(1) == 3
    confirmations.note("e", 1, 3, holds=False)
    assert confirmations.version(1) == 9


def test_who_is_not_of_the_group_is_no_witness(confirmations, make_plan):
    for peer in ("d", "stranger"):
        confirmations.note(peer, 0, 50, holds=True)
    confirmations.note("a", 77, 50, holds=True)
    assert [confirmations.version(group) for group in (0, 1, 2, 77)] == [0, 0, 0, 0]
    confirmations.note("a", 0, 50, holds=True)
    confirmations.obey(make_plan([["b", "c"], ["d", "a"], ["f"]], coordinator="a", order=(1, 2)).plan)
    assert confirmations.version(0) == 0, "it has moved"


def test_the_end_needs_a_majority_of_all_members_of_every_group(confirmations, plan):
    confirmations.note_ends([("a", b"1"), ("b", b"2"), ("f", b"6"), ("d", b"4"), ("stranger", b"")])
    assert confirmations.ends == (), "one of two is no majority, whether the other one answers or not"
    confirmations.note_ends([("e", b"5")])
    assert dict(confirmations.ends) == {"a": b"1", "b": b"2", "d": b"4", "e": b"5", "f": b"6"}
    assert proves_end(plan, "abdef")
    assert not proves_end(plan, "abcde")


def test_a_new_era_has_seen_no_end(confirmations, make_plan):
    confirmations.note_ends((peer, b"") for peer in "abcdef")
    confirmations.note("a", 0, 50, holds=True)
    confirmations.obey(make_plan([["a", "b", "c"], ["d", "e"], ["f"]], coordinator="a", order=(1, 2), era=1).plan)
    assert (confirmations.ends, confirmations.version(0)) == ((), 0)
