"""Runs child processes that end, with all their descendants, when this process ends.

Each child leads its own session, so the terminal's Ctrl-C reaches only the parent, which then drains the swarm in
order. The children's libp2p daemons lead their own sessions too, so no process group covers them; a token in the
environment, which every descendant inherits, identifies them. If the parent is killed (SIGKILL), the kernel kills the
children (PR_SET_PDEATHSIG), and their daemons notice that and end.
"""

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

CLI = (sys.executable, "-m", "shoal.deploy.cli")

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_TOKEN = "SHOAL_SWARM"
_POLL_S = 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    name: str
    process: asyncio.subprocess.Process
    log: Path
    reader: "asyncio.Task[None]" = field(init=False)
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child, but not to its descendants. Nothing happens if the child has ended."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def rss_bytes(self) -> int:
        """Resident memory of the child in bytes, without its network daemon; 0 once the child has ended."""
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0


class Children:
    """Starts children, passes their output lines on, and ends them.

    Args:
        on_line: called with (child, one line of its standard output without the newline).
        on_exit: called with (child, exit status), after the child's output has been read to the end.
    """

    def __init__(self, *, on_line: Callable[[Child, bytes], None], on_exit: Callable[[Child, int], None]) -> None:
        self.all: list[Child] = []
        """All children started so far, oldest first. Two may have the same name, since a peer can be restarted."""
        self._token = secrets.token_hex(16)
        self._on_line = on_line
        self._on_exit = on_exit

    async def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str], log: Path) -> Child:
        """Run `argv` as a child, with its standard error in the file `log` and a pipe as its standard input.

        Raises: OSError: the child cannot be started.
        """
        parent = os.getpid()

        def die_with_parent() -> None:
            # This runs between fork and exec: only async-signal-safe calls. The parent may already be dead.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        # A daemon that inherited this pipe would keep it open after its peer ended; hivemind gives it another one.
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env={**env, _TOKEN: self._token},
                start_new_session=True,
                preexec_fn=die_with_parent,
                limit=1024 * 1024,  # a status of 500 peers is about 100 KiB of JSON
            )
        child = Child(name=name, process=process, log=log)
        child.reader = asyncio.create_task(self._read(child), name=f"read {name}")
        self.all.append(child)
        return child

    async def tell(self, child: Child, text: str) -> None:
        """Write `text` to the child's standard input, and close this input. Nothing happens if the child has ended."""
        assert child.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            child.process.stdin.write(text.encode())
            await child.process.stdin.drain()
            child.process.stdin.close()

    async def kill(self, child: Child, *, patience_s: float = 10.0) -> list[int]:
        """Kill the child alone (SIGKILL), as a fault would. Then wait until its network daemon ends by itself, which
        takes 1.6 s on an idle machine.

        Returns: process ids of descendants that still run after `patience_s`; there should be none.
        """
        try:
            descendants = psutil.Process(child.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            descendants = []
        child.send(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while descendants:
                    descendants = [process for process in descendants if _is_there(process)]
                    await asyncio.sleep(_POLL_S)
        return [process.pid for process in descendants]

    def terminate(self) -> None:
        """Ask every child to leave (SIGTERM)."""
        for child in self.all:
            child.send(signal.SIGTERM)  # not its daemon, which must send the goodbye

    async def wait(self, *, timeout_s: float) -> bool:
        """Wait until all children have ended. Returns: False if some still run after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                for child in self.all:
                    await child.exited.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Kill all children and their descendants that still run, and wait until none is left."""
        while left := [process for process in psutil.process_iter() if self._is_ours(process)]:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(_POLL_S)
        await asyncio.gather(*(child.reader for child in self.all))

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.environ().get(_TOKEN) == self._token:
                return _is_there(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass  # gone, or another user's
        return False

    async def _read(self, child: Child) -> None:
        assert child.process.stdout is not None
        try:
            async for line in child.process.stdout:
                self._on_line(child, line.rstrip(b"\n"))
        finally:
            status = await child.process.wait()
            child.exited.set()
            self._on_exit(child, status)


def last_line(log: Path) -> str:
    """Return the last line of a child's standard error; empty if there is none."""
    lines: Sequence[str] = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _is_there(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
