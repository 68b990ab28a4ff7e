import socket

import pytest

from shoal.protocol.errors import TransportError
from shoal.protocol.live.listen import from_this_machine, keep_ports, local_addresses, refuse_ports_in_use


def test_free_and_chosen_ports_pass():
    refuse_ports_in_use(["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"])


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_listening_port_is_refused_even_if_it_would_be_shared(reuse_port):
    with socket.socket() as other:
        if reuse_port:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1 port {port}: address already in use"):
            refuse_ports_in_use([f"/ip4/127.0.0.1/tcp/{port}"])


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:80", "/ip4/127.0.0.1/udp/1/quic-v1", "/ip4/127.0.0.1/tcp/70000", "/ip4/127.0.0.1/tcp/1/p2p/x"],
)
def test_an_address_that_cannot_be_listened_on_is_named(address):
    with pytest.raises(TransportError, match="cannot listen on"):
        refuse_ports_in_use([address])


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.77 port 4001"):
        refuse_ports_in_use(["/ip4/192.0.2.77/tcp/4001"])


@pytest.mark.parametrize(
    ("listen", "visible", "kept"),
    [
        (["/ip4/0.0.0.0/tcp/0"], ["/ip4/127.0.0.1/tcp/7", "/ip4/192.0.2.2/tcp/7"], ("/ip4/0.0.0.0/tcp/7",)),
        (["/ip4/127.0.0.1/tcp/5"], ["/ip4/127.0.0.1/tcp/5"], ("/ip4/127.0.0.1/tcp/5",)),
        (["/ip4/1.2.3.4/tcp/0", "/ip6/::/tcp/0"], ["/ip6/::1/tcp/9"], ("/ip4/1.2.3.4/tcp/0", "/ip6/::/tcp/9")),
        (["/ip4/1.2.3.4/tcp/0"], ["/dns4/example.org/tcp/99"], ("/ip4/1.2.3.4/tcp/0",)),
        (["/ip4/1.2.3.4/tcp/0"], ["/ip4/1.2.3.4/tcp/7", "/ip4/1.2.3.4/tcp/8"], ("/ip4/1.2.3.4/tcp/0",)),
    ],
    ids=["chosen", "fixed", "by family", "announced only", "ambiguous"],
)
def test_a_chosen_port_is_kept_for_the_next_start(listen, visible, kept):
    assert keep_ports(listen, visible) == kept


def test_this_machine_reaches_who_listens_on_all_addresses_by_loopback():
    listen = ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/9", "/ip4/192.0.2.2/tcp/8", "/ip4/0.0.0.0/tcp/0"]
    assert from_this_machine(listen) == ("/ip4/127.0.0.1/tcp/7", "/ip6/::1/tcp/9", "/ip4/192.0.2.2/tcp/8")


def test_this_machines_addresses_are_those_of_its_cards():
    assert "127.0.0.1" in local_addresses()
    assert "192.0.2.77" not in local_addresses()
