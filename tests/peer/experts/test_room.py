"""How many tokens a holder of experts takes from each sender."""

from shoal.peer.services.expert_server import Room
from shoal.protocol.identity import PeerID

A, B, C = (PeerID(name) for name in "abc")


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
