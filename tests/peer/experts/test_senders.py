"""Whom a holder of experts takes tokens from, and how many of each."""

from shoal.peer.services.senders import LEFT_S, STRANGER, Room, Senders
from shoal.protocol.identity import PeerID
from shoal.protocol.plan import ExpertGroup, Member, Plan, Stage

ME, A, B, C, X = (PeerID(name) for name in ("me", "a", "b", "c", "x"))


def plan(sequence: int, first: list[PeerID], second: list[PeerID], spares: tuple[PeerID, ...] = ()) -> Plan:
    def members(peers: list[PeerID]) -> tuple[Member, ...]:
        return tuple(Member(peer, 1.0, 1.0, 1) for peer in peers)

    return Plan(
        run="r",
        term=1,
        sequence=sequence,
        previous="",
        coordinator=ME,
        stages=(Stage(0, 1, members(first)), Stage(1, 2, members(second))),
        spares=spares,
        experts=tuple(ExpertGroup(stage, 0, members([ME])) for stage in (0, 1)),
    )


def test_members_may_send_and_strangers_may_not() -> None:
    senders = Senders(ME)
    assert senders.admits(ME)
    assert not senders.admits(A)
    senders.follow(plan(1, [ME, A], [B], spares=(C,)), now_s=0.0)
    assert all(senders.admits(peer) for peer in (ME, A, B, C))
    assert not senders.admits(X)
    assert not senders.admits(STRANGER)


def test_who_moves_or_leaves_may_send_what_it_has_under_way() -> None:
    senders = Senders(ME)
    senders.follow(plan(1, [ME, A], [B, C]), now_s=0.0)
    senders.follow(plan(2, [ME, B], [C]), now_s=100.0)  # a leaves, b moves
    senders.follow(plan(3, [ME, B], [C]), now_s=100.0 + 0.5 * LEFT_S)
    assert all(senders.admits(peer) for peer in (A, B, C))
    senders.follow(plan(4, [ME, B], [C]), now_s=100.0 + LEFT_S)
    assert not senders.admits(A)
    assert all(senders.admits(peer) for peer in (B, C))


def test_nobody_takes_more_than_its_part_of_the_room() -> None:
    room = Room(5, each=2)
    assert [room.take(A) for _ in range(3)] == [True, True, False]
    assert [room.take(B) for _ in range(2)] == [True, True]
    assert [room.take(C) for _ in range(2)] == [True, False], "there is no more for anybody"
    room.leave(A)
    assert room.take(C)
    for peer in (A, B, B, C, C):
        room.leave(peer)
    assert not room._taken, "names that have gone are not kept"
