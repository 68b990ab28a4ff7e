"""Who is let in, and by whom: children that pretend."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.deploy.base.children import Children
from shoal.deploy.commands.options import said_parts
from shoal.deploy.demo.crew import Crew, CrewMember
from shoal.deploy.record.report import Joined, Ready
from shoal.protocol.errors import LocalError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import make_invite, parse_invite
from shoal.protocol.limits import ADDRESSES_MAX
from shoal.protocol.live import leftovers

OWNER = Identity.generate().peer_id
RUN = "0123456789abcdef"
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(6)]
HOST = 5


class PretendChildren(Children):
    def __init__(self) -> None:
        super().__init__(on_line=lambda child, line: None, on_exit=lambda child, status: None)
        self.told: dict[str, str] = {}

    async def tell(self, child: Any, text: str) -> None:
        self.told[child.name] = text

    async def kill(self, child: Any) -> list[int]:
        child.is_running = False
        return []


def crew_of(count: int, *, addresses: int = 1) -> tuple[Crew, PretendChildren, list[CrewMember]]:
    children = PretendChildren()
    crew = Crew(children, folder=Path(), spec_path=Path(), data="")
    for number in range(count):
        child: Any = SimpleNamespace(name=f"peer-{number}", is_running=True, send=lambda signal: None)
        member = CrewMember(child=child)
        crew.members.append(member)
        own = tuple(f"/ip4/127.0.0.{index + 1}/tcp/1/p2p/{PEERS[number]}" for index in range(addresses))
        crew.take(member, Joined(peer=PEERS[number], name=child.name, invite=make_invite(RUN, OWNER, own)))
    return crew, children, crew.members


def invited_by(crew: Crew, children: PretendChildren) -> list[int]:
    """The peers behind the addresses that a newcomer is given."""
    child: Any = SimpleNamespace(name="newcomer", is_running=True)
    asyncio.run(crew.let_in(CrewMember(child=child)))
    invite = parse_invite(children.told["newcomer"])
    assert (invite.run, invite.owner) == (RUN, OWNER)
    return [PEERS.index(PeerID(address.rpartition("/")[2])) for address in invite.addresses]


def test_before_anybody_has_joined_the_hosts_invite_is_all_there_is() -> None:
    crew, children, (host,) = crew_of(1)
    host.invite = ""
    own = make_invite(RUN, OWNER, (f"/ip4/127.0.0.1/tcp/1/p2p/{PEERS[HOST]}",))
    crew.take(host, Ready(peer=OWNER, run=RUN, invite=own))
    assert crew.invite == own
    assert invited_by(crew, children) == [HOST]


def test_the_dead_and_the_suspended_invite_nobody() -> None:
    crew, children, members = crew_of(4)
    asyncio.run(crew.kill(members[0]))
    crew.suspend(members[2])
    assert invited_by(crew, children) == [1, 3]
    crew.resume(members[2])
    assert invited_by(crew, children) == [1, 2, 3]


def test_one_address_of_each_comes_before_a_second_of_any() -> None:
    crew, children, _ = crew_of(5, addresses=2)
    assert sorted(invited_by(crew, children)) == sorted([0, 1, 2, 3, 4, 0, 1, 2][:ADDRESSES_MAX])


def test_a_namesake_is_another_member() -> None:
    crew, _, members = crew_of(2)
    asyncio.run(crew.kill(members[1]))
    child: Any = SimpleNamespace(name="peer-1", is_running=True)
    again = CrewMember(child=child)
    crew.members.append(again)
    assert crew.member_of(child) is again
    assert crew.member_of(members[1].child) is members[1]
    assert crew.alive == [members[0], again]


def test_those_who_join_are_told_what_the_host_reads_in_its_spec(tmp_path: Path) -> None:
    started: list[list[str]] = []

    class Starting(PretendChildren):
        async def start(self, name: str, argv: Any, **_: Any) -> Any:
            started.append(list(argv))
            return SimpleNamespace(name=name, is_running=True)

    crew = Crew(Starting(), folder=tmp_path, spec_path=tmp_path / "run.toml", data="/text", tokenizer="/t.json")

    async def start_two() -> None:
        await crew.start()
        await crew.start()

    asyncio.run(start_two())
    host, join = (" ".join(argv) for argv in started)
    assert "--data /text --tokenizer /t.json" in join
    assert "--data" not in host
    assert "--tokenizer" not in host


def test_the_cores_are_divided_and_who_comes_back_has_what_it_had(tmp_path: Path, monkeypatch: Any) -> None:
    started: list[str] = []

    class Starting(PretendChildren):
        async def start(self, name: str, argv: Any, **_: Any) -> Any:
            started.append(next(word for word in argv if word.startswith("compute_share=")))
            return SimpleNamespace(name=name, is_running=True)

    monkeypatch.setattr("shoal.deploy.demo.crew.processors", lambda: 2)
    crew = Crew(Starting(), folder=tmp_path, spec_path=tmp_path / "run.toml", data="", parts=(1.0, 2.0, 5.0))

    async def start() -> None:
        for name in ("", "", "", "", "peer-1"):
            await crew.start(name)

    asyncio.run(start())
    assert [word.removeprefix("compute_share=") for word in started] == ["0.250", "0.500", "1.000", "1.000", "0.250"]


@pytest.mark.parametrize("text", ["", "1,,2", "1,x", "0,1", "-1", "inf", "nan"])
def test_parts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(LocalError, match="--parts is numbers above 0"):
        said_parts(text)


def test_what_the_killed_leave_in_the_systems_folder_is_removed_at_the_end(tmp_path: Path) -> None:
    crew = Crew(PretendChildren(), folder=tmp_path, spec_path=Path(), data="")
    sockets = []
    for name in ("peer-1", "peer-2"):
        path = tmp_path / f"hivemind-p2pd-{name}.sock"
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
        sockets.append(path)
        (crew.peers_folder / name).mkdir(parents=True)
        leftovers.remember(crew.peers_folder / name, _gone_process(), [path])
    (crew.peers_folder / "peer-3").mkdir()  # it has left in order
    asyncio.run(crew.tidy())
    assert not any(path.exists() for path in sockets)


def _gone_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid
