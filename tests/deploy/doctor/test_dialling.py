"""How a connection goes, on real sockets."""

import asyncio
import errno
import socket
from collections.abc import Iterator

import pytest

from shoal.deploy.doctor import probes
from shoal.deploy.doctor.findings import Dial
from shoal.deploy.doctor.probes import dial, host_and_port, is_loopback, of_error


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as open_port:
        open_port.bind(("127.0.0.1", 0))
        yield open_port


def test_an_open_port_answers(listener: socket.socket) -> None:
    listener.listen()
    assert asyncio.run(dial("127.0.0.1", listener.getsockname()[1])) is Dial.ANSWERS
    assert asyncio.run(dial("localhost", listener.getsockname()[1])) is Dial.ANSWERS


def test_a_port_on_which_nobody_listens_refuses(listener: socket.socket) -> None:
    assert asyncio.run(dial("127.0.0.1", listener.getsockname()[1])) is Dial.REFUSED


def test_a_port_that_swallows_what_comes_is_silent(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing_comes_back(host: str, port: int) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(probes, "_DIAL_S", 0.05)
    monkeypatch.setattr(asyncio, "open_connection", nothing_comes_back)
    assert asyncio.run(dial("127.0.0.1", listener.getsockname()[1])) is Dial.SILENT


@pytest.mark.parametrize("silent", [True, False])
def test_a_name_that_leads_nowhere(silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Dial:
        async def getaddrinfo(*arguments: object, **options: object) -> None:
            if silent:
                await asyncio.Event().wait()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
        return await dial("train.example.org", 4001)

    monkeypatch.setattr(probes, "_DIAL_S", 0.05)
    assert asyncio.run(main()) is Dial.NO_NAME


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (OSError(errno.ENETUNREACH, ""), Dial.NO_ROUTE),
        (OSError(errno.EADDRNOTAVAIL, ""), Dial.NO_ROUTE),
        (OSError(errno.EHOSTUNREACH, ""), Dial.SILENT),
        (OSError(errno.ETIMEDOUT, ""), Dial.SILENT),
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), Dial.REFUSED),
        (ConnectionResetError(errno.ECONNRESET, ""), Dial.REFUSED),
        (socket.gaierror(-2, ""), Dial.NO_NAME),
    ],
)
def test_what_an_error_means(error: OSError, how: Dial) -> None:
    assert of_error(error) is how


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("/ip4/84.12.33.7/tcp/4001", ("84.12.33.7", 4001)),
        ("/ip6/2001:db8::1/tcp/4001/p2p/x", ("2001:db8::1", 4001)),
        ("/dns/train.example.org/tcp/4001", ("train.example.org", 4001)),
        ("/ip4/84.12.33.7/tcp/4001/p2p/x/p2p-circuit", ("", 0)),
        ("/ip4/84.12.33.7/udp/4001/quic", ("", 0)),
        ("/ip4/84.12.33.7/tcp/99999", ("", 0)),
    ],
)
def test_where_an_address_leads(address: str, place: tuple[str, int]) -> None:
    assert host_and_port(address) == place


def test_what_stays_on_this_machine() -> None:
    assert is_loopback("127.0.0.5")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("10.0.0.1")
    assert not is_loopback("example.org")
