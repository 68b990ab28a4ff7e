"""Runs one peer process per device of this machine, all in one run under one command.

Each process is a `shoal join` with one device. The machine's network limits are divided evenly among these processes,
signals are forwarded to all, and the command ends when the last one ends.
"""

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import typer

from shoal.deploy.base.children import CLI, Child, Children, last_line
from shoal.deploy.manners.device import spare_threads
from shoal.deploy.manners.limits import MBIT_S_MIN, Limits
from shoal.deploy.terminal.plain import say as show


@dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """The owner's options for all peers together.

    Args:
        listen: a multiaddr; the first peer listens there, the other peers on ports that the system chooses.
        threads: torch threads of each peer; 0: divide the machine's spare cores.
        flags: passed on to each peer unchanged.
    """

    name: str
    limits: Limits
    listen: str
    state_dir: Path | None
    threads: int
    flags: Sequence[str]

    def argv(self, index: int, device: str, *, among: int, threads: int) -> list[str]:
        host, _, _ = self.listen.rpartition("/")
        name, listen = f"{self.name}-{index + 1}", self.listen if index == 0 else f"{host}/0"
        argv = [*CLI, "join", "-", f"--name={name}", f"--device={device}", f"--listen={listen}", "--yes"]
        if self.state_dir is not None:
            argv.append(f"--state-dir={self.state_dir / f'peer-{index + 1}'}")
        for limit, value in msgspec.to_builtins(share_of(self.limits, among)).items():
            if value is not None and value != "":
                argv.append(f"--limit={limit}={str(value).lower() if isinstance(value, bool) else value}")
        return [*argv, f"--threads={threads}", *self.flags]


def share_of(limits: Limits, among: int) -> Limits:
    """Return the limits of one of `among` peers: its part of the network rates, and the device limits undivided."""
    rates = {name: getattr(limits, name) for name in ("upload_mbit_s", "download_mbit_s", "relay_mbit_s")}
    parts = {name: max(MBIT_S_MIN, rate / among) for name, rate in rates.items() if rate > 0.0}
    return msgspec.structs.replace(limits, **parts)


async def join_with_each(
    devices: Sequence[str], invite: str, each: Each, *, first: Sequence[str] = (), plain: bool = False
) -> int:
    """Take part with every device until the last peer ends.

    Args:
        first: additional arguments of the first peer.
        plain: print the children's lines without the peers' names in front.
    Returns: an exit status: the first that is not 0; 0 if all ended well.
    """
    statuses: list[int] = []

    def say(child: Child, line: bytes) -> None:
        text = line.decode(errors="replace")
        if plain:
            typer.echo(text)
        else:
            show(f"{child.name}: {text}")

    def ended(child: Child, status: int) -> None:
        statuses.append(status)
        if status:
            show(f"{child.name} ended with status {status}: {last_line(child.log)}", err=True)

    children, loop = Children(on_line=say, on_exit=ended), asyncio.get_running_loop()

    def hand_on(number: signal.Signals) -> None:
        for child in children.all:
            child.send(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, hand_on, number)
    threads = each.threads or max(1, spare_threads() // len(devices))
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        try:
            for index, device in enumerate(devices):
                argv = each.argv(index, device, among=len(devices), threads=threads)
                log = Path(folder, f"{index}.log")
                child = await children.start(device, [*argv, *(first if index == 0 else ())], env=os.environ, log=log)
                await children.tell(child, f"{invite}\n")
            for child in children.all:
                await child.reader
        finally:
            await children.close()
    return next((status for status in statuses if status), 0)
