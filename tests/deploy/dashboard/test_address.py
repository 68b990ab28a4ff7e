"""`--dashboard`, with and without a value."""

import contextlib
import socket

import pytest

from shoal.deploy.dashboard.address import DEFAULT, PORT_MAX, PORTS_TRIED, parse_address, with_default
from shoal.protocol.errors import LocalError


@pytest.mark.parametrize(
    ("text", "host", "port", "is_public", "url"),
    [
        ("127.0.0.1:8640", "127.0.0.1", 8640, False, "http://127.0.0.1:8640/"),
        (":80", "127.0.0.1", 80, False, "http://127.0.0.1:80/"),
        ("localhost:1", "localhost", 1, False, "http://localhost:1/"),
        ("[::1]:9", "::1", 9, False, "http://[::1]:9/"),
        ("0.0.0.0:8", "0.0.0.0", 8, True, "http://127.0.0.1:8/"),
        ("192.168.1.7:7", "192.168.1.7", 7, True, "http://192.168.1.7:7/"),
        ("box.local:0", "box.local", 0, True, "http://box.local:0/"),
    ],
)
def test_an_address_is_a_host_and_a_port(text, host, port, is_public, url):
    address = parse_address(text)
    assert (address.host, address.port, address.is_public, address.url(port=port)) == (host, port, is_public, url)


@pytest.mark.parametrize("text", ["", "8640", "host", "host:", "host:x", "a b:1", "127.0.0.1:65536", "http://x:1"])
def test_what_is_none_is_refused_with_an_example(text):
    with pytest.raises(LocalError, match="--dashboard"):
        parse_address(text)


def test_a_name_counts_as_one_of_this_machines():
    assert parse_address("box.local:1").names == ("box.local",)
    assert parse_address("127.0.0.1:1").names == ()


@pytest.mark.parametrize(
    ("args", "filled"),
    [
        (["--dashboard"], ["--dashboard", DEFAULT]),
        (["--dashboard", "shoal1abc"], ["--dashboard", DEFAULT, "shoal1abc"]),
        (["--dashboard", "--peers", "3"], ["--dashboard", DEFAULT, "--peers", "3"]),
        (["--dashboard", ":1", "x"], ["--dashboard", ":1", "x"]),
        (["--dashboard", "[::1]:1"], ["--dashboard", "[::1]:1"]),
        (["run.toml", "--dashboard"], ["run.toml", "--dashboard", DEFAULT]),
        (["--peers", "3"], ["--peers", "3"]),
    ],
)
def test_a_bare_option_has_its_default(args, filled):
    assert with_default(args) == filled


def test_the_next_free_port_serves_and_after_the_last_one_whichever_the_system_has():
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with parse_address(f"127.0.0.1:{port}").bind() as second:
            assert port < second.getsockname()[1] or port + PORTS_TRIED > PORT_MAX
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # whoever else has it will do as well
            held.enter_context(socket.create_server(("127.0.0.1", PORT_MAX)))
        with parse_address(f"127.0.0.1:{PORT_MAX}").bind() as other:
            assert other.getsockname()[1] != PORT_MAX
