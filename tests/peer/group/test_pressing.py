from shoal.peer.encoding.vectors import VECTORS
from shoal.peer.group.reduce import Reduction
from shoal.peer.group.reductions import BELIEVED_S, PRESS_S, Pressing
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundMember, RoundStart

ME, MATE, FAR = PeerID("me"), PeerID("mate"), PeerID("far")


def a_round() -> Reduction:
    members = tuple(RoundMember(peer=peer, bandwidth=1.0, indices=b"\x01") for peer in (ME, MATE, FAR))
    start = RoundStart(
        stage=0, step=3, attempt=1, members=members, duplicates=0, given_up=0, loss_sum=0.0, staleness_sum=0
    )
    return Reduction(ME, start, 30, microbatches=8, vectors=VECTORS)


def test_nothing_is_pressed_without_a_round() -> None:
    assert not Pressing().stands_still(None, 100.0)


def test_a_round_is_pressed_when_nothing_has_come_for_long_and_again_after_as_long() -> None:
    pressing, reduction = Pressing(), a_round()
    assert not pressing.stands_still(reduction, 10.0)
    assert not pressing.stands_still(reduction, 10.0 + 0.9 * PRESS_S)
    assert pressing.stands_still(reduction, 10.0 + PRESS_S)
    assert pressing.is_due(MATE, 10.0 + PRESS_S, took_s=0.1)
    assert not pressing.is_due(MATE, 10.0 + 1.5 * PRESS_S, took_s=0.1)
    assert pressing.is_due(MATE, 10.0 + 2.0 * PRESS_S, took_s=0.1)


def test_a_piece_that_comes_begins_the_wait_anew() -> None:
    pressing, reduction = Pressing(), a_round()
    pressing.stands_still(reduction, 0.0)
    reduction.num_taken += 1
    assert not pressing.stands_still(reduction, PRESS_S)
    assert pressing.stands_still(reduction, 2.0 * PRESS_S)


def test_one_slow_way_keeps_nobody_else_waiting() -> None:
    """A peer that was suspended let a piece wait for twenty seconds; the others' lost ones are sent again at once."""
    pressing, reduction = Pressing(), a_round()
    pressing.stands_still(reduction, 0.0)
    assert pressing.stands_still(reduction, PRESS_S)
    assert not pressing.is_due(FAR, PRESS_S, took_s=20.0)
    assert pressing.is_due(MATE, PRESS_S, took_s=0.1)
    assert pressing.is_due(FAR, 40.0, took_s=20.0)


def test_pressing_was_in_vain_until_something_comes() -> None:
    pressing, reduction = Pressing(), a_round()
    pressing.stands_still(reduction, 0.0)
    assert not pressing.was_in_vain(reduction)
    pressing.stands_still(reduction, PRESS_S)
    assert pressing.was_in_vain(reduction)
    reduction.num_taken += 1
    assert not pressing.was_in_vain(reduction)
    assert not pressing.was_in_vain(a_round())


def test_mates_whose_pieces_have_yet_to_leave_are_believed_for_a_while_after_each_piece() -> None:
    pressing, reduction = Pressing(), a_round()
    pressing.stands_still(reduction, 10.0)
    assert pressing.believes(9.0 + BELIEVED_S)
    assert not pressing.believes(10.0 + BELIEVED_S)
    reduction.num_taken += 1
    pressing.stands_still(reduction, 10.0 + BELIEVED_S)
    assert pressing.believes(9.0 + 2 * BELIEVED_S)
