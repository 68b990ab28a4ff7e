from shoal.peer.pipeline.queueing import LinkQueues
from shoal.protocol.identity import PeerID

A, B = PeerID("a"), PeerID("b")


def test_what_a_message_took_longer_than_the_quickest_it_waited() -> None:
    queues = LinkQueues()
    assert [queues.sent(A, took_s) for took_s in (0.5, 0.75, 0.25, 1.25)] == [0.0, 0.25, 0.0, 1.0]


def test_each_link_has_its_own_quickest() -> None:
    queues = LinkQueues()
    queues.sent(A, 0.25)
    assert queues.sent(B, 8.0) == 0.0
    assert queues.sent(B, 9.0) == 1.0
    assert (queues.last_waited_s(A), queues.last_waited_s(B)) == (0.0, 1.0)


def test_nothing_is_known_of_a_link_that_was_not_used() -> None:
    assert LinkQueues().last_waited_s(A) == 0.0
