"""Runs the demo's peers as processes: starts, admits, kills and suspends them."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.deploy.base.children import CLI, Child, Children
from shoal.deploy.control.control_socket import ask
from shoal.deploy.record.report import Joined, Obeys, Ready
from shoal.peer.compute.cgroup import processors
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import InviteKey, make_invite, parse_invite
from shoal.protocol.limits import ADDRESSES_MAX
from shoal.protocol.live import leftovers


@dataclass(slots=True, kw_only=True, eq=False)
class CrewMember:
    """One process of the crew. A restarted peer is a second member with the name and folder of the first."""

    child: Child
    peer: PeerID | None = None
    """The peer's identifier; None: it has not joined yet."""
    invite: str = ""
    """An invite with the peer's own address; empty: it has not joined yet."""
    obeys: bool = False
    """True once the peer has reported that it follows a plan."""
    killed: bool = False
    """True if the demo killed this process: its end is no error."""
    dismissed: bool = False
    """True if the demo asked this process to leave."""
    suspended: bool = False
    awake_since_s: float = field(default_factory=time.monotonic)
    """When this process was started or last resumed, in `time.monotonic()`."""

    @property
    def name(self) -> str:
        return self.child.name

    @property
    def is_alive(self) -> bool:
        return self.child.is_running and not self.killed


class Crew:
    """Starts the host and the joining peers.

    Args:
        folder: the demo's folder; each peer gets the folder `peers/NAME` and the log `logs/NAME.log` there.
        spec_path: the run spec that the host starts.
        data: the run's text; empty: the default text.
        tokenizer: path of the run's tokenizer.json; empty: the run has none.
        parts: relative shares of this machine's cores, one for each peer in the order of their first starts. Further
            peers get the last share. None: no limits.
    """

    def __init__(
        self,
        children: Children,
        *,
        folder: Path,
        spec_path: Path,
        data: str,
        tokenizer: str = "",
        parts: Sequence[float] | None = None,
    ) -> None:
        self.members: list[CrewMember] = []
        self.invite = ""
        """The host's invite; empty: the host is not up yet."""
        self._key: InviteKey | None = None
        self._children = children
        self._folder = folder
        self._spec_path = spec_path
        self._text = [*(["--data", data] if data else []), *(["--tokenizer", tokenizer] if tokenizer else [])]
        self._numbers = itertools.count(1)
        self._parts = parts
        self._shares: dict[str, float] = {}
        """Peer's name -> the share of one core's time that the peer may use, above 0 and at most 1."""

    @property
    def peers_folder(self) -> Path:
        return self._folder / "peers"

    @property
    def logs(self) -> Path:
        return self._folder / "logs"

    @property
    def alive(self) -> list[CrewMember]:
        return [member for member in self.members if member.is_alive]

    def member_of(self, child: Child) -> CrewMember:
        return next(member for member in reversed(self.members) if member.child is child)

    async def start(self, name: str = "") -> CrewMember:
        """Start a new peer, or restart `name` in its folder. The first peer hosts; later peers wait for an invite."""
        hosts = not self.members
        name = name or f"peer-{next(self._numbers)}"
        common = ["--name", name, "--state-dir", str(self.peers_folder / name), "--listen", "127.0.0.1:0"]
        what = ["host", str(self._spec_path)] if hosts else ["join", "-"]
        if not hosts:
            common += self._text
        # One priority for all: by default a host has the normal one, and a joining peer the lowest.
        common += ["--limit", "nice=0"]
        if self._parts is not None:
            common += ["--limit", f"compute_share={self._share_of(name, self._parts):.3f}"]
        argv = [*CLI, *what, *common, "--threads", "1", "--device", "cpu", "--no-record", "--reports"]
        for folder in (self.peers_folder, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        child = await self._children.start(name, argv, env=environment(), log=self.logs / f"{name}.log")
        member = CrewMember(child=child)
        self.members.append(member)
        return member

    def _share_of(self, name: str, parts: Sequence[float]) -> float:
        """Return the share of one core's time for the peer `name`, the same at each of its starts."""
        if name not in self._shares:
            part = parts[min(len(self._shares), len(parts) - 1)]
            self._shares[name] = min(1.0, part / sum(parts) * processors())
        return self._shares[name]

    async def let_in(self, member: CrewMember) -> None:
        """Give the member an invite that names the present members."""
        await self._children.tell(member.child, self._current_invite() + "\n")

    async def kill(self, member: CrewMember) -> list[int]:
        """Send SIGKILL. Returns: process ids of children that the member left behind."""
        member.killed = True
        return await self._children.kill(member.child)

    def suspend(self, member: CrewMember) -> None:
        """Send SIGSTOP: the process stops without closing anything; its daemon still accepts calls."""
        member.suspended = True
        member.child.send(signal.SIGSTOP)

    def resume(self, member: CrewMember) -> None:
        member.suspended = False
        member.awake_since_s = time.monotonic()
        member.child.send(signal.SIGCONT)

    def terminate(self, members: Sequence[CrewMember]) -> None:
        for member in members:
            member.dismissed = True
            member.child.send(signal.SIGTERM)

    async def tidy(self) -> None:
        """Remove the socket files that killed members left. Call this when no peer runs any more."""
        for folder in sorted(self.peers_folder.glob("*")):
            await leftovers.clear(folder)

    async def open_to_all(self) -> None:
        """Let the host make an invite without a limit of machines: killed peers would use up a limited number."""
        made = await asyncio.to_thread(ask, self.peers_folder / self.members[0].child.name, "invite-new")
        self.invite = str(made["invite"])
        self._key = parse_invite(self.invite).key

    def take(self, member: CrewMember, report: Ready | Joined | Obeys) -> None:
        match report:
            case Ready():
                self.invite = report.invite
            case Joined():
                member.peer, member.invite = report.peer, report.invite
            case Obeys():
                member.obeys = True

    def _current_invite(self) -> str:
        """Return an invite that names living members, oldest first; the host's invite while no member has joined."""
        invites = [parse_invite(member.invite) for member in self.alive if member.invite and not member.suspended]
        if not invites:
            return self.invite
        # An invite has few addresses: take the first one of each member, then the second ones.
        rounds = itertools.zip_longest(*(invite.addresses for invite in invites))
        addresses = [address for turn in rounds for address in turn if address is not None]
        key = self._key or invites[0].key
        return make_invite(invites[0].run, invites[0].owner, tuple(addresses[:ADDRESSES_MAX]), key)


def environment() -> Mapping[str, str]:
    """Return the environment of a peer, for many peers on shared cores: one thread for the peer, one for its network
    daemon (Go's scheduler would spin), and one heap (each of glibc's several heaps would keep its peak size)."""
    # No settings: the user's limits are meant for other people's runs, and the demo must not wait for their hours.
    return {
        "OMP_NUM_THREADS": "1",
        "GOMAXPROCS": "1",
        "MALLOC_ARENA_MAX": "1",
        **os.environ,
        "XDG_CONFIG_HOME": os.devnull,
    }
