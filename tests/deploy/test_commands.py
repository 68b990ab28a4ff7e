"""`shoal invite`, `shoal leave` and `shoal doctor`, with a peer that pretends."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import segno
from typer.testing import CliRunner

from shoal.coordinator.swarm_status import status_before_the_plan
from shoal.deploy import cli
from shoal.deploy.commands import doctor as doctor_command
from shoal.deploy.commands.addresses import announced_addresses, listen_addresses
from shoal.deploy.commands.invite import qr_code
from shoal.deploy.commands.running import running_here
from shoal.deploy.control.control_socket import ControlServer
from shoal.deploy.doctor.diagnosis import Diagnosis
from shoal.deploy.doctor.findings import Problem
from shoal.deploy.state import places
from shoal.deploy.visitor import status
from shoal.protocol.errors import LocalError, RunNotFound
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, make_invite
from shoal.protocol.messages import SwarmStatus
from shoal.protocol.spec import RunSpec

OWNER = Identity(bytes(32)).peer_id
INVITE = make_invite("0123456789abcdef", OWNER, [f"/ip4/127.0.0.1/tcp/9/p2p/{OWNER}"])


ANSWERS: dict[str, dict[str, Any]] = {
    "invite": {"invite": INVITE, "run": "r", "peers": 2},
    "leave": {},
    "pause": {"paused": True, "reasons": ["you asked for it"]},
    "resume": {"paused": False, "reasons": []},
}


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


class PretendPeer:
    """Answers on a control socket from a thread of its own, and writes down what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self._up, self._down = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        server = ControlServer(self.folder)
        for verb, answer in ANSWERS.items():

            async def handler(
                arguments: Mapping[str, Any], verb: str = verb, answer: Any = answer
            ) -> Mapping[str, Any]:
                self.asked.append((verb, arguments))
                return dict(answer)

            server.on(verb, handler)
        await server.start()
        self._up.set()
        await self._down.wait()
        await server.close()

    def __enter__(self) -> "PretendPeer":
        self.folder.mkdir(parents=True)
        self._thread.start()
        assert self._up.wait(30)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._down.set)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PretendPeer]:
    with PretendPeer(tmp_path / "peer") as peer, places.announced(INVITE, peer.folder):
        yield peer


def shoal(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def two_peers(tmp_path: Path) -> Iterator[dict[str, PretendPeer]]:
    """ana and bob, of runs of their own, in this process and, by its note, in the one that started it."""
    bobs = places.announced(INVITE, tmp_path / "b", name="bob", run_name="notes")
    with PretendPeer(tmp_path / "a") as ana, PretendPeer(tmp_path / "b") as bob, bobs:
        (note,) = places.all_running()
        parent = psutil.Process().ppid()
        other = msgspec.structs.replace(
            note,
            pid=parent,
            created_s=places._created_s(parent),
            folder=str(ana.folder),
            name="ana",
            run_name="poems",
            started_s=0.0,
        )
        (places.state_root() / "running" / f"{parent}.json").write_bytes(msgspec.json.encode(other))
        yield {"ana": ana, "bob": bob}


def test_the_hosts_commands_go_to_the_host_though_a_guest_was_started_after_it(
    two_peers: dict[str, PretendPeer],
) -> None:
    (path,) = (path for path in (places.state_root() / "running").iterdir() if path.stem != str(os.getpid()))
    note = msgspec.json.decode(path.read_bytes(), type=places.Running)
    assert running_here(None, hosts=True) == two_peers["bob"].folder, "no host is here: the newest peer refuses"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(note, hosts=True)))
    assert running_here(None, hosts=True) == two_peers["ana"].folder
    assert running_here(None) == two_peers["bob"].folder


@pytest.mark.parametrize("command", ["pause", "resume", "leave"])
def test_of_two_peers_a_command_asks_which(command: str, two_peers: dict[str, PretendPeer]) -> None:
    result = shoal(command)
    assert (result.exit_code, result.stdout) == (2, "")
    said = " ".join(result.stderr.split())
    assert f"2 peers run on this machine: `shoal {command} bob` (run notes), `shoal {command} ana` (run poems)" in said
    assert f"or all of them with `shoal {command} --all`" in said
    assert [peer.asked for peer in two_peers.values()] == [[], []]
    assert "no peer called eve runs here" in shoal(command, "eve").stderr
    assert "say one of them" in shoal(command, "ana", "--all").stderr


def test_the_peer_that_is_named_is_paused_and_said(two_peers: dict[str, PretendPeer], tmp_path: Path) -> None:
    assert shoal("pause", "ana").stdout == "ana: paused: you asked for it\n"
    assert shoal("resume", "--state-dir", tmp_path / "a").stdout == "ana: computing\n"
    assert [verb for verb, _ in two_peers["ana"].asked] == ["pause", "resume"]
    assert two_peers["bob"].asked == []
    both = shoal("pause", "--all", "--json").stdout
    assert [(told["name"], told["paused"]) for told in json.loads(both)] == [("bob", True), ("ana", True)]


def test_peers_of_one_name_are_told_apart_by_their_folders(two_peers: dict[str, PretendPeer]) -> None:
    for path in (places.state_root() / "running").glob("*.json"):
        note = msgspec.json.decode(path.read_bytes(), type=places.Running)
        path.write_bytes(msgspec.json.encode(msgspec.structs.replace(note, name="volunteer")))
    assert "`shoal pause b`" in shoal("pause", "volunteer").stderr
    assert shoal("pause", "a").stdout.startswith("a: paused")


def test_the_only_peer_needs_no_name(peer: PretendPeer) -> None:
    assert shoal("pause").stdout == "peer: paused: you asked for it\n"


def test_the_invite_is_all_that_is_printed(peer: PretendPeer) -> None:
    result = shoal("invite")
    assert (result.exit_code, result.stdout) == (0, INVITE + "\n")
    assert peer.asked == [("invite", {"peers": 3})]
    shown = json.loads(shoal("invite", "--json", "--peers", 5).stdout)
    assert shown == {"invite": INVITE, "run": "r", "peers": 2}
    assert peer.asked[1] == ("invite", {"peers": 5})


def test_the_qr_code_is_the_invites(peer: PretendPeer) -> None:
    result = shoal("invite", "--qr")
    first, *drawn = result.stdout.splitlines()
    assert first == INVITE
    assert "\x1b" not in result.stdout
    rows: list[list[int]] = []
    for line in drawn:  # each letter is two modules, one above the other; a drawn half is light
        rows.append([int(letter not in "█▀") for letter in line])
        rows.append([int(letter not in "█▄") for letter in line])
    matrix = [list(row) for row in segno.make(INVITE, error="l", micro=False).matrix_iter(border=4)]
    assert rows[: len(matrix)] == matrix


def test_on_a_terminal_the_qr_code_brings_its_colours() -> None:
    assert all(line.startswith("\x1b[97;40m") for line in qr_code(INVITE, coloured=True).splitlines())


@pytest.mark.parametrize("command", ["invite", "leave"])
def test_with_no_peer_up_that_is_said(command: str, tmp_path: Path) -> None:
    result = shoal(command)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no peer runs on this machine" in result.stderr
    result = shoal(command, "--state-dir", tmp_path)
    assert result.exit_code == 2
    assert f"no peer runs in {tmp_path}" in result.stderr


def test_a_note_of_an_older_shoal_is_no_peer() -> None:
    with places.announced(INVITE):
        assert "no peer runs" in shoal("invite").stderr
        assert "no peer runs" in shoal("leave", "--all").stderr


def test_leaving_waits_for_the_process_and_says_if_it_stays(peer: PretendPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended peer is this process, which does not end."""
    monkeypatch.setattr("shoal.deploy.commands.leave._DRAIN_S_MAX", 0.01)
    result = shoal("leave", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == [{"name": "peer", "folder": str(peer.folder), "left": False}]
    assert "has not ended" in result.stderr
    shoal("leave", "--now", "--state-dir", peer.folder)
    shoal("leave", "--all")
    assert [asked[1]["drains"] for asked in peer.asked] == [True, False, True]


# --- doctor ---

PROBLEM = Problem(code="clock", side="you", sentence="the clock is off", remedy="set it")


@pytest.mark.parametrize(("fatal", "code"), [(True, 1), (False, 0)])
def test_the_doctors_word(fatal: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(code="clock", side="you", sentence="the clock is off", remedy="set it", fatal=fatal)
    monkeypatch.setattr(doctor_command, "diagnosis_of", lambda *a, **o: Diagnosis(problems=(problem,), fine=("disk",)))
    result = shoal("doctor", INVITE)
    assert result.exit_code == code
    assert "the clock is off (on this machine)" in result.stdout
    assert "do this: set it" in result.stdout
    assert "ok       disk" in result.stdout
    shown = shoal("doctor", "--json")
    assert shown.exit_code == code
    assert json.loads(shown.stdout)["main"] == ("clock" if fatal else None)


@pytest.mark.parametrize("known", [True, False])
def test_join_says_why_nobody_was_found(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*arguments: object) -> None:
        raise RunNotFound("is the host up?")

    problems = (PROBLEM,) if known else ()
    monkeypatch.setattr("shoal.deploy.session.session.join_run", nobody)
    monkeypatch.setattr(doctor_command, "diagnosis_of", lambda *a, **o: Diagnosis(problems=problems, fine=()))
    result = shoal("join", INVITE)
    assert (result.exit_code, result.stdout) == (2, "")
    assert ("the clock is off" in result.stderr) is known
    assert "nobody at the invite's addresses has the run 0123456789abcdef; looking for the reason" in result.stderr
    assert ("is the host up?" in result.stderr) is not known
    assert "Traceback" not in result.stderr


# --- addresses as people write them ---


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("84.12.33.7:4001", "/ip4/84.12.33.7/tcp/4001"),
        ("[2001:db8::1]:4001", "/ip6/2001:db8::1/tcp/4001"),
        ("train.example.org:4001", "/dns/train.example.org/tcp/4001"),
        ("/dns4/x.org/tcp/1", "/dns4/x.org/tcp/1"),
    ],
)
def test_what_is_announced(text: str, address: str) -> None:
    assert announced_addresses([text]) == (address,)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "4001",
            ":4001",
            "host",
            "host:0",
            "host:99999",
            "host:x",
            "ho st:1",
            "host:1 ",
            "-:",
            "[1.2.3.4:1",
            "::1:1",
        ),
        *("0.0.0.0:4001", "[::]:4001", "224.0.0.1:4001", "256.1.1.1:4001", "1.2.3:4001", "[fe80::1%eth0]:4001"),
        *("/ip4/1.2.3.4", "/ip4/1.2.3.4/udp/1", "/ip4/1.2.3.4/tcp/0", "/ip4/1.2.3.4/tcp/1/p2p/x", "/ip4/::1/tcp/1"),
        *("/ip4/256.1.1.1/tcp/1", "/ip4/x.org/tcp/1", "/dns/1.2.3/tcp/1", "/ip4/…", "/unix/tmp/x", "x.org,y.org:1"),
    ],
)
def test_what_cannot_be_announced(text: str) -> None:
    with pytest.raises(LocalError, match=r"^--announce "):
        announced_addresses([text])


def test_more_addresses_than_others_are_told_are_refused() -> None:
    with pytest.raises(LocalError, match=r"^--announce is given 9 times"):
        announced_addresses([f"84.12.33.7:{port}" for port in range(1, 10)])
    assert announced_addresses(["84.12.33.7:1"] * 2) == ("/ip4/84.12.33.7/tcp/1",)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4001",
        "localhost:0",
        "256.1.1.1:0",
        "0.0.0.0:65536",
        "::1:0",
        "/ip4/0.0.0.0/udp/1",
        "/ip4/0.0.0.0",
        "/dns/x/tcp/1",
    ],
)
def test_where_nobody_can_listen(text: str) -> None:
    with pytest.raises(LocalError, match=r"^--listen .*: write HOST:PORT"):
        listen_addresses(text)


@pytest.mark.parametrize("option", [("--listen", "localhost:0"), ("--announce", "/ip4/1.2.3.4/udp/1")])
def test_an_address_with_a_mistake_ends_the_command(option: tuple[str, str]) -> None:
    result = shoal("join", INVITE, *option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"shoal: {option[0]} {option[1]}: write " in result.stderr


def test_where_to_listen() -> None:
    assert listen_addresses(":4001") == ("/ip4/0.0.0.0/tcp/4001",)
    assert listen_addresses("[::1]:0") == ("/ip6/::1/tcp/0",)
    assert listen_addresses("/ip4/127.0.0.1/tcp/0") == ("/ip4/127.0.0.1/tcp/0",)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_the_status_of_a_run_that_waits_is_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    waits = status_before_the_plan("0123456789abcdef", RunSpec(name="small"), OWNER, "peers: 1 of 2 are here")

    async def ask(invite: Invite) -> SwarmStatus:
        return waits

    monkeypatch.setattr(status, "ask_swarm", ask)
    result = CliRunner().invoke(cli.app, ["status", INVITE, *flags])
    assert result.exit_code == 0, result.output
    if flags:
        assert msgspec.json.decode(result.output, type=SwarmStatus) == waits
    else:
        assert result.output == "run 0123456789abcdef (small): waiting for peers: 1 of 2 are here\n"
