import socket
import struct
import sys

import pytest

from shoal.protocol.limits import LANES_MAX
from shoal.protocol.live.lane_supply import LANES_FIRST, LaneCount, sent_of


def test_a_way_that_loses_nothing_has_the_first_lanes_for_ever():
    count = LaneCount()
    for look in range(100):
        count.look(packets=1_000 * look, again=look)
    assert count.wanted == LANES_FIRST


def test_a_way_that_loses_packets_has_all_lanes_after_some_looks():
    count, wanted = LaneCount(), []
    for look in range(1, 5):
        count.look(packets=1_000 * look, again=10 * look)
        wanted.append(count.wanted)
    assert wanted == [8, 8, 8, 8]
    assert LANES_MAX == 8


def test_a_few_packets_say_nothing():
    count = LaneCount()
    count.look(packets=200, again=10)
    assert count.wanted == LANES_FIRST
    count.look(packets=400, again=11)
    assert count.wanted == 2 * LANES_FIRST, "together with those before they do"


def test_lanes_that_have_ended_take_their_packets_along():
    count = LaneCount()
    count.look(packets=10_000, again=1)
    count.look(packets=5_000, again=0)
    count.look(packets=5_400, again=0)
    assert count.wanted == LANES_FIRST
    count.look(packets=5_800, again=8)
    assert count.wanted == 2 * LANES_FIRST


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it")
def test_the_kernels_word_is_read_where_it_stands():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as caller, listener.accept()[0] as accepted:
            for _ in range(5):
                caller.sendall(b"x")
                assert accepted.recv(1) == b"x"
            info = caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    assert sent_of([info, b"too short", info]) == (10, 0)
    again = bytearray(info)
    struct.pack_into("=I", again, 100, 3)
    assert sent_of([bytes(again)]) == (5, 3)
