"""On the kernel's own sockets: this process plays the daemon, with connections to itself."""

import asyncio
import contextlib
import os
import socket
import sys

import pytest

from shoal.protocol.live.sock_diag import TcpSocket
from shoal.protocol.live.tcp_queues import TcpQueues, lane_name, name_of, ways_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says it")


@contextlib.contextmanager
def connection(family=socket.AF_INET, address="127.0.0.1"):
    """Both ends. The one that was accepted reads nothing unless asked to."""
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        with socket.socket(family) as caller:
            caller.connect(listener.getsockname())
            accepted, _ = listener.accept()
            with accepted:
                yield caller, accepted


@pytest.fixture
def as_if_afar(monkeypatch):
    """What ends on this machine counts as well."""
    monkeypatch.setattr(TcpSocket, "is_local", False)


def named(caller):
    host, port, *_ = caller.getpeername()
    return f"{host} {port}"


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), pytest.param(socket.AF_INET6, "::1", id="ipv6")]
)
@pytest.mark.usefixtures("as_if_afar")
def test_bytes_that_nobody_reads_stand_in_the_queue_until_they_are_read(family, address):
    async def main():
        with connection(family, address) as (caller, accepted):
            queues = TcpQueues(os.getpid())
            assert queues.look([named(caller)])[named(caller)].queued_bytes == 0
            caller.setblocking(False)
            written = 0
            with contextlib.suppress(BlockingIOError):
                while True:
                    written += caller.send(bytes(1 << 16))
            full = queues.look([named(caller)])[named(caller)]
            assert full.queued_bytes > 0
            assert full.delivered_bytes + full.queued_bytes == pytest.approx(written, abs=2)
            assert 0.0 <= full.round_trip_s < 1.0
            accepted.setblocking(True)
            left = written
            while left:
                left -= len(accepted.recv(1 << 20))
            async with asyncio.timeout(10.0):
                while queues.look([named(caller)])[named(caller)].queued_bytes:  # noqa: ASYNC110 - the kernel wakes nobody
                    await asyncio.sleep(0.01)
            queues.close()

    try:
        asyncio.run(main())
    except OSError as error:
        if family == socket.AF_INET6 and "assign" in str(error):
            pytest.skip("no IPv6 here")
        raise


@pytest.mark.usefixtures("as_if_afar")
def test_a_connection_that_is_closed_is_gone():
    async def main():
        with connection() as (caller, _):
            queues, name = TcpQueues(os.getpid()), named(caller)
            assert name in queues.look([name])
        assert name not in queues.look([name])
        queues.close()

    asyncio.run(main())


@pytest.mark.usefixtures("as_if_afar")
def test_several_hundred_connections_are_asked_for_at_once():
    async def main():
        with contextlib.ExitStack() as stack:
            names = [named(stack.enter_context(connection())[0]) for _ in range(200)]
            queues = TcpQueues(os.getpid())
            assert queues.look(names).keys() == set(names)
            queues.close()

    asyncio.run(main())


def test_what_ends_on_this_machine_does_not_pass_the_uplink():
    async def main():
        with connection() as (caller, _):
            queues = TcpQueues(os.getpid())
            assert not queues.look([named(caller)])
            queues.close()

    asyncio.run(main())


@pytest.mark.usefixtures("as_if_afar")
def test_sockets_of_other_processes_are_not_the_daemons():
    async def main():
        with connection() as (caller, _):
            queues = TcpQueues(os.getppid())
            assert not queues.look([named(caller)])
            queues.close()

    asyncio.run(main())


@pytest.mark.usefixtures("as_if_afar")
def test_lanes_are_sockets_of_this_process_and_are_told_apart_by_their_own_ports():
    async def main():
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(2)
            with socket.create_connection(listener.getsockname()) as one:
                with socket.create_connection(listener.getsockname()) as other:
                    queues = TcpQueues(os.getppid())
                    names = [lane_name(*each.getpeername(), each.getsockname()[1]) for each in (one, other)]
                    other.setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        while True:
                            other.send(bytes(1 << 16))
                    found = queues.look(names)
                    assert found[names[0]].queued_bytes == 0
                    assert found[names[1]].queued_bytes > 0
                assert queues.look(names).keys() == {names[0]}
                queues.close()

    asyncio.run(main())


def test_a_process_that_is_gone_is_an_error():
    async def main():
        with pytest.raises(FileNotFoundError):
            TcpQueues(2**22 + 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("multiaddr", "name"),
    [
        ("/ip4/20.0.1.10/tcp/4001", "20.0.1.10 4001"),
        ("/ip6/::ffff:20.0.1.10/tcp/4001", "20.0.1.10 4001"),
        ("/ip6/2001:db8::1/tcp/4001", "2001:db8::1 4001"),
        ("/ip4/20.0.1.10/tcp/4001/p2p/QmRelay/p2p-circuit", "20.0.1.10 4001"),
        ("/ip4/20.0.1.10/udp/4001/quic", None),
        ("/dns4/example.org/tcp/4001", None),
        ("/ip4/nonsense/tcp/4001", None),
        ("/p2p-circuit", None),
    ],
)
def test_a_multiaddr_names_its_connection(multiaddr, name):
    assert name_of(multiaddr) == name


@pytest.mark.parametrize(
    ("family", "address"), [(socket.AF_INET, "127.0.0.1"), pytest.param(socket.AF_INET6, "::1", id="ipv6")]
)
def test_a_connection_owes_nothing_once_its_kernel_has_answered_whether_or_not_anybody_reads(family, address):
    with connection(family, address) as (caller, accepted):
        caller.send(b"hello")
        (way,) = ways_of(os.getpid())[named(caller)].values()
        assert not way.is_owed
        assert way.silent_s < 5.0
        assert way.local == address
        accepted.send(b"unread")


def test_two_connections_to_one_port_are_told_apart():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2)
        with socket.socket() as one, socket.socket() as other:
            one.connect(listener.getsockname())
            other.connect(listener.getsockname())
            assert len(ways_of(os.getpid())[named(one)]) == 2
