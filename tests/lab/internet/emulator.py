"""An internet of network namespaces: `router.c` carries the packets, this starts it, tells it what to do, and ends it.

Nothing outlives the `async with`: namespaces have no names and end with the router and the processes inside them, the
router ends with its standard input, and what `run` starts is killed. A program that is killed itself leaves nothing
either.
"""

import asyncio
import contextlib
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

NatKind = Literal["none", "full-cone", "address-restricted", "port-restricted", "symmetric"]

_SOURCE = Path(__file__).with_name("router.c")
_MBIT = 1e6
_MS_NS = 1e6
_ENDS_S = 5.0
_ENDS_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_FIELDS = {
    "up_mbps": ("up_bits_per_s", _MBIT),
    "down_mbps": ("down_bits_per_s", _MBIT),
    "queue_ms": ("queue_ns", _MS_NS),
    "last_mile_ms": ("last_mile_ns", _MS_NS),
    "jitter_ms": ("jitter_ns", _MS_NS),
    "loss": ("loss", 1.0),
    "maps_ports": ("maps_ports", 1.0),
}
"""The router's name of each field, and how many of its units ours has."""


class Refused(Exception):
    """The router does not take an order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What a home or a data centre has of the internet."""

    up_mbps: float = 1000.0
    down_mbps: float = 1000.0
    queue_ms: float = 100.0
    """What waits longer than this before either link, at the link's rate, is dropped."""
    last_mile_ms: float = 0.0
    """One way, beside the path's own."""
    jitter_ms: float = 0.0
    """Each packet takes between 0 and this longer, uniformly; none overtakes another."""
    loss: float = 0.0
    """Probability that a packet is lost on this line, each way; a packet between two lines passes both."""
    nat: NatKind = "none"
    maps_ports: bool = False
    """The NAT opens a port for whoever asks by NAT-PMP."""


class PathBetween(NamedTuple):
    """The way between two lines, one way."""

    ms: float
    jitter_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a line has carried since it is there."""

    up_bytes: int
    down_bytes: int
    up_dropped: int
    """Packets that found the uplink's queue full."""
    down_dropped: int
    lost: int
    refused: int
    """Packets from outside that the NAT did not want, or whose address is nobody's any more."""
    misaddressed: int
    """Packets from inside that go nowhere, or do not come from their host's address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    line: int
    namespace: int
    """The number of the namespace's file in the router's process."""


@dataclass(slots=True, eq=False)
class Internet:
    """Lines, hosts on them, and paths between them; up between `__aenter__` and `__aexit__`. Root only.

    A host is named in the methods, and its line is meant: of several hosts on one line each means the same.
    """

    lines: Mapping[str, Line]
    hosts: Mapping[str, str]
    """The line of each host."""
    path: Callable[[str, str], PathBetween]
    """The path between two lines, alike both ways."""
    seed: int = 1
    _router: asyncio.subprocess.Process | None = None
    _ordering: asyncio.Lock = field(default_factory=asyncio.Lock)
    _hosts: dict[str, _Host] = field(default_factory=dict)
    _addresses: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _running: set[asyncio.subprocess.Process] = field(default_factory=set)

    async def __aenter__(self) -> "Internet":
        program = await asyncio.to_thread(compiled)
        self._router = await asyncio.create_subprocess_exec(
            program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            await self._make()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def router_pid(self) -> int:
        assert self._router is not None
        return self._router.pid

    def inside(self, host: str) -> list[str]:
        """The words to put before a command, so that it runs on the host. The command takes the process over."""
        return ["nsenter", f"--net=/proc/{self.router_pid}/fd/{self._hosts[host].namespace}", "--"]

    async def start(self, host: str, argv: Sequence[str]) -> asyncio.subprocess.Process:
        """Start a command on the host, with pipes at its standard input and output. It ends with the internet."""
        process = await asyncio.create_subprocess_exec(
            *_ENDS_WITH_US, *self.inside(host), *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._running.add(process)
        return process

    async def run(self, host: str, argv: Sequence[str], *, timeout_s: float = 30.0) -> str:
        """Run a command on the host to its end. Returns: what it printed.

        Raises: Refused: it failed, or took longer.
        """
        process = await self.start(host, argv)
        try:
            async with asyncio.timeout(timeout_s):
                printed, _ = await process.communicate()
        except TimeoutError as error:
            raise Refused(f"{argv[0]} on {host} has not ended in {timeout_s:g} s") from error
        if process.returncode:
            raise Refused(f"{argv[0]} on {host} ended with status {process.returncode}")
        return printed.decode()

    async def set(self, host: str, name: str, value: float) -> None:
        """Change a field of `Line`, all but its NAT, from now on."""
        await self._set(self._hosts[host].line, name, value)

    async def cut(self, host: str) -> None:
        """Unplug the host's line: nothing comes or goes, and nobody is told."""
        await self._order("cut", self._hosts[host].line)

    async def heal(self, host: str) -> None:
        await self._order("heal", self._hosts[host].line)

    async def sever(self, host: str, other: str) -> None:
        """Let nothing pass between these two lines; others still reach both."""
        await self._order("sever", self._hosts[host].line, self._hosts[other].line)

    async def join(self, host: str, other: str) -> None:
        await self._order("join", self._hosts[host].line, self._hosts[other].line)

    async def address(self, host: str) -> str:
        """Give the host's line another public address, as a laptop gets in another network. Connections from before are
        dead, and nobody is told. Returns: the address."""
        new = self._new_address()
        await self._order("address", self._hosts[host].line, new)
        return new

    async def stats(self, host: str) -> Stats:
        counts = [int(word) for word in await self._order("stats", self._hosts[host].line)]
        return Stats(**dict(zip(Stats.__dataclass_fields__, counts, strict=True)))

    # --- inside ---

    async def _make(self) -> None:
        await self._order("seed", self.seed)
        numbers: dict[str, int] = {}
        addresses: dict[str, str] = {}
        for name, line in self.lines.items():
            addresses[name] = self._new_address()
            (number,) = await self._order("line", addresses[name], line.nat)
            numbers[name] = int(number)
            for what in _FIELDS:
                await self._set(numbers[name], what, getattr(line, what))
        for a, b in itertools.combinations(self.lines, 2):
            path = self.path(a, b)
            await self._order("path", numbers[a], numbers[b], round(path.ms * _MS_NS), round(path.jitter_ms * _MS_NS))
        inside = dict.fromkeys(self.lines, 10)
        for name, at in self.hosts.items():
            line = self.lines[at]
            own = addresses[at] if line.nat == "none" else f"192.168.{numbers[at]}.{inside[at]}"
            if line.nat == "none" and inside[at] > 10:
                raise Refused(f"{name} needs a NAT to share the line {at}: without one, a line has one host")
            inside[at] += 1
            _, namespace = await self._order("host", numbers[at], own)
            self._hosts[name] = _Host(line=numbers[at], namespace=int(namespace))

    def _new_address(self) -> str:
        """Another address that libp2p takes for public, in a network of its own."""
        number = next(self._addresses)
        return f"20.{number // 256}.{number % 256}.10"

    async def _set(self, line: int, name: str, value: float) -> None:
        if name not in _FIELDS:
            raise Refused(f"a line has no field {name!r}, but {', '.join(_FIELDS)}")
        theirs, scale = _FIELDS[name]
        await self._order("set", line, theirs, f"{value * scale:.9g}")

    async def _order(self, *words: object) -> list[str]:
        """Returns: the words of the answer. Raises: Refused."""
        router = self._router
        assert router is not None
        assert router.stdin is not None
        assert router.stdout is not None
        order = " ".join(map(str, words))
        async with self._ordering:
            with contextlib.suppress(ConnectionError):
                router.stdin.write(f"{order}\n".encode())
                await router.stdin.drain()
            answer = (await router.stdout.readline()).decode().split()
        if not answer:
            raise Refused(f"the router has ended, and was told: {order}")
        if answer[0] != "ok":
            raise Refused(f"{' '.join(answer[1:])} (it was told: {order})")
        return answer[1:]

    async def _close(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        router = self._router
        assert router is not None
        assert router.stdin is not None
        router.stdin.close()
        try:
            async with asyncio.timeout(_ENDS_S):
                await router.wait()
        except TimeoutError:
            router.kill()
            await router.wait()
        for process in self._running:
            await process.wait()


def why_not() -> str:
    """The reason why no internet can be made on this machine; empty: one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    for program in ("cc", "nsenter", "setpriv", "unshare"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        return "the system lets nobody make network namespaces"
    return ""


def compiled() -> Path:
    """The router's program, compiled at its first use. Raises: subprocess.CalledProcessError."""
    source = _SOURCE.read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal-lab"
    program = cache / f"router-{hashlib.blake2b(source, digest_size=8).hexdigest()}"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:  # two that compile at once do not meet
            fresh = Path(folder) / "router"
            subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", str(fresh), str(_SOURCE)], check=True)
            fresh.rename(program)
    return program
