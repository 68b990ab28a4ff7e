"""A restart listens where the peer listened before, and its dashboard is where it was."""

import asyncio
import socket
import stat
from pathlib import Path

from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.dashboard.feed import RunFacts
from shoal.deploy.session.beside import serving
from shoal.deploy.state.kept_addresses import FILE_NAME, KeptAddresses, keep_addresses, load_addresses
from shoal.protocol.spec import RunSpec

ANY4, ANY6 = "/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"


def test_a_port_that_the_system_chose_is_kept_and_one_that_the_user_named_is_not(tmp_path: Path) -> None:
    asked = (ANY4, "/ip6/::/tcp/4001")
    assert load_addresses(tmp_path).fill(asked) == asked
    kept = load_addresses(tmp_path).with_ports(asked, ("/ip4/0.0.0.0/tcp/43117", "/ip6/::/tcp/4001"))
    keep_addresses(tmp_path, kept)
    again = load_addresses(tmp_path)
    assert again.fill(asked) == ("/ip4/0.0.0.0/tcp/43117", "/ip6/::/tcp/4001")
    assert again.fill((ANY6,)) == (ANY6,)


def test_where_the_port_cannot_be_known_yesterdays_stays(tmp_path: Path) -> None:
    kept = KeptAddresses(ports={"4": 43117}).with_ports((ANY4,), (ANY4,))
    assert kept.ports == {"4": 43117}


def test_a_damaged_file_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    assert load_addresses(tmp_path) == KeptAddresses()


def served(folder: Path, address: str) -> str:
    async def main() -> str:
        facts = RunFacts.of(RunSpec())
        async with serving(parse_address(address), facts, title="", steers=True, folder=folder) as showing:
            return showing.announcement

    return asyncio.run(main())


def test_the_dashboard_is_at_the_address_of_yesterday_key_and_all(tmp_path: Path) -> None:
    first = served(tmp_path, "127.0.0.1:0")
    assert "#" in first
    assert served(tmp_path, "127.0.0.1:0") == first
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600


def test_where_its_port_is_taken_another_one_serves_with_the_same_key(tmp_path: Path) -> None:
    first = served(tmp_path, "127.0.0.1:0")
    with socket.create_server(("127.0.0.1", load_addresses(tmp_path).dashboard_port)):
        second = served(tmp_path, "127.0.0.1:0")
    assert second != first
    assert second.partition("#")[2] == first.partition("#")[2]
