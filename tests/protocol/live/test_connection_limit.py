"""One address may not have all of a daemon's connections."""

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator

import psutil
import pytest

from shoal.protocol.errors import Unreachable
from shoal.protocol.limits import (
    CONNECTIONS_OF_ADDRESS_MAX,
    CONNECTIONS_OF_NETWORK_MAX,
    CONNECTIONS_OPENED_MAX,
    SHUT_OUT_ADDRESSES_MAX,
    SHUT_OUT_S,
)
from shoal.protocol.live.connection_limit import ConnectionLimit, _divert, read_connections
from shoal.protocol.live.loop import run

HOST = ipaddress.ip_address("192.0.2.7").packed
FLOOD = "127.0.0.66"


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel says it")
@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_connections_are_counted_by_where_they_come_from(host: str) -> None:
    with contextlib.ExitStack() as stack:
        listeners = []
        for _ in range(2):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                listener.bind((host, 0))
                listener.listen(8)
                listeners.append(listener)
        if not listeners:
            pytest.skip("this machine has no IPv6")
        ours, others = (listener.getsockname()[1] for listener in listeners)

        def come(port: int, whence: str) -> socket.socket:
            return stack.enter_context(
                socket.create_connection(("127.0.0.1", port), source_address=(whence, 0), timeout=5)
            )

        come(ours, FLOOD)
        come(ours, "127.0.0.67")
        come(others, FLOOD)
        gone = come(ours, FLOOD)
        before = read_connections({ours})
        assert {address: len(ends) for address, ends in before.items()} == {
            ipaddress.ip_address(FLOOD).packed: 2,
            ipaddress.ip_address("127.0.0.67").packed: 1,
        }
        for _ in range(3):
            listeners[0].accept()[0].close()
        gone.close()
        assert not any(ends - before[address] for address, ends in read_connections({ours}).items()), "none is new"


def test_an_address_with_too_many_is_shut_out_until_it_has_been_quiet() -> None:
    gate = ConnectionLimit(())
    gate.look({HOST: CONNECTIONS_OF_ADDRESS_MAX}, 0.0)
    assert gate.shut_out == frozenset()
    gate.look({HOST: CONNECTIONS_OF_ADDRESS_MAX + 1}, 1.0)
    assert gate.shut_out == {HOST}
    gate.look({HOST: CONNECTIONS_OF_ADDRESS_MAX}, 50.0)
    gate.look({}, 50.0 + SHUT_OUT_S)
    assert gate.shut_out == {HOST}, "it had many a minute ago"
    gate.look({HOST: 1}, 50.1 + SHUT_OUT_S)
    assert gate.shut_out == frozenset()


@pytest.mark.parametrize("network", ["8.8.8.0/24", "2a00:1450:4001::/48"])
def test_a_public_network_has_a_limit_for_all_of_its_addresses(network: str) -> None:
    wide = ipaddress.ip_network(network)
    address, whole = (4, 3) if wide.version == 4 else (8, 6)

    def each(number: int) -> dict[bytes, int]:
        """Eight addresses of it, each well below what one may have."""
        step = 1 if wide.version == 4 else 1 << 64
        return {(wide.network_address + n * step).packed[:address]: number for n in range(8)}

    gate = ConnectionLimit(())
    gate.look(each(CONNECTIONS_OF_NETWORK_MAX // 8), 0.0)
    assert gate.shut_out == frozenset()
    gate.look(each(CONNECTIONS_OF_NETWORK_MAX // 8 + 1), 1.0)
    assert gate.shut_out == {wide.network_address.packed[:whole]}
    gate.look({}, 1.1 + SHUT_OUT_S)
    assert gate.shut_out == frozenset()
    one = next(iter(each(1)))
    gate.look({one: 10_000}, 100.0)
    assert gate.shut_out == {one}, "one address alone does not shut out its neighbours"


def test_an_address_that_opens_without_end_is_shut_out_however_few_stand() -> None:
    gate, one, other = ConnectionLimit(()), bytes((8, 8, 8, 8)), bytes((8, 8, 8, 9))
    for look in range(CONNECTIONS_OPENED_MAX // 60):
        gate.look({one: 60, other: 60}, look * 0.1, {one: 60})
    assert gate.shut_out == frozenset()
    gate.look({one: 60, other: 60}, 1.0, {one: 60})
    assert gate.shut_out == {one}
    gate.look({}, 1.1 + SHUT_OUT_S)
    assert gate.shut_out == frozenset()


def test_a_network_whose_addresses_open_without_end_is_shut_out() -> None:
    gate, opened = ConnectionLimit(()), {bytes((8, 8, 8, n)): 60 for n in range(40)}
    gate.look({}, 0.0, opened)
    assert gate.shut_out == {bytes((8, 8, 8))}


@pytest.mark.parametrize("near", ["127.0.0.0", "10.1.2.0", "192.168.1.0", "172.20.0.0", "fd00::", "fe80::"])
def test_a_house_of_many_peers_has_no_limit_but_that_of_each_address(near: str) -> None:
    first = ipaddress.ip_address(near)
    step, size = (1, 4) if first.version == 4 else (1 << 64, 8)
    gate = ConnectionLimit(())
    house = {(first + n * step).packed[:size]: CONNECTIONS_OF_ADDRESS_MAX for n in range(200)}
    for look in range(20):
        gate.look(house, 0.1 * look, house)
    assert gate.shut_out == frozenset()


def test_addresses_without_number_do_not_fill_the_memory() -> None:
    gate = ConnectionLimit(())
    gate.look({number.to_bytes(8): 10_000 for number in range(10_000)}, 0.0)
    assert len(gate.shut_out) == SHUT_OUT_ADDRESSES_MAX


@contextlib.contextmanager
def half_open(port: int, number: int, *, address: str = FLOOD, family: int = socket.AF_INET) -> Iterator[int]:
    """So many connections that say nothing. Yields: how many of them stand."""
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    with contextlib.ExitStack() as stack:
        standing = 0
        for _ in range(number):
            link = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            link.bind((address, 0))
            link.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                link.connect((host, port))
                standing += 1
        yield standing


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel can do it")
def test_the_kernel_takes_a_program_for_as_many_as_may_be_shut_out() -> None:
    async def main() -> None:
        for version, host, size in (("4", "127.0.0.1", 4), ("6", "::1", 8)):
            family = socket.AF_INET if version == "4" else socket.AF_INET6
            with socket.socket(family, socket.SOCK_STREAM) as daemon:
                daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                try:
                    daemon.bind((host, 0))
                except OSError:
                    assert version == "6"  # which not every machine has
                    continue
                daemon.listen(256)
                port = daemon.getsockname()[1]
                gate = ConnectionLimit([f"/ip{version}/{host}/tcp/{port}"])
                gate.open()
                others = {number.to_bytes(4) + bytes(size - 4): 1000 for number in range(1, SHUT_OUT_ADDRESSES_MAX)}
                gate.look(others, 0.0)
                with half_open(port, 20, address=host, family=family) as standing:
                    assert standing == 20, "those who are not shut out"
                packed = ipaddress.ip_address(host).packed
                for shut in (packed[:size], packed[: size * 3 // 4]):
                    _divert(gate._sockets[0][1], int(version), [*list(others)[: SHUT_OUT_ADDRESSES_MAX - 1], shut])
                    with half_open(port, 5, address=host, family=family) as standing:
                        assert standing <= 1, "one waits in the queue, the others outside"
                    _divert(gate._sockets[0][1], int(version), others)
                    with half_open(port, 5, address=host, family=family) as standing:
                        assert standing == 5
                await gate.close()
                with half_open(port, 5, address=host, family=family) as standing:
                    assert standing == 5

    asyncio.run(main())


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel can do it")
def test_while_one_address_floods_a_member_is_called_and_dialled(live_peer, eventually) -> None:
    """1,000 half-open connections: 1,310 files of the daemon before there was a gate."""

    async def main() -> None:
        flooded, _ = await live_peer("flooded")
        caller, _ = await live_peer("caller")
        await caller.introduce(flooded.peer_id, flooded.addresses())
        await caller.call(flooded.peer_id, b"hello", timeout_s=30)
        port = int(flooded.addresses()[0].split("/")[4])
        daemon = psutil.Process(flooded.daemon.process_id)
        files = daemon.num_fds()
        with half_open(port, CONNECTIONS_OF_ADDRESS_MAX + 50):
            await eventually(lambda: flooded.daemon._connection_limit.shut_out)
            with half_open(port, 5) as standing:
                assert standing <= 1
            assert daemon.num_fds() < files + CONNECTIONS_OF_ADDRESS_MAX + 60
            await caller.call(flooded.peer_id, b"hello", timeout_s=1)
            newcomer, _ = await live_peer("newcomer")
            await newcomer.introduce(flooded.peer_id, flooded.addresses())
            await newcomer.call(flooded.peer_id, b"hello", timeout_s=5)
            await newcomer.close()
        os.kill(flooded.daemon.process_id, signal.SIGKILL)  # the next daemon has the same port, and a gate of its own
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(Unreachable):
                    await caller.call(flooded.peer_id, b"hello", timeout_s=5)
                    break
                await asyncio.sleep(0.05)
        assert int(flooded.addresses()[0].split("/")[4]) == port
        await caller.close()
        await flooded.close()
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))  # nothing of ours is left on it

    run(main())
