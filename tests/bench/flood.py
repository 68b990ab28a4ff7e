"""A member's calls while one address floods the member whom it calls: how long until each is answered.

Three processes: a member that answers calls, a member that makes them (this one), and an attacker who knows nothing but
the address. The attacks are one after the other, with peace before them:

    opened    so many connections a second, each reset as soon as it stands
    hello     so many a second, each with the beginning of a TLS handshake: the member pays for a key and a signature,
              the attacker sends the same bytes again and again
    idle      connections that stand and say nothing, so many at once, opened again when they are closed
    stuck     the same, each in the middle of a TLS handshake
    all       hello at its rate and stuck at its number

`call` goes over the connection that stands. `dial` goes over a new one, which a member needs after each cut of its
line: it has to get through the same door as the flood.
"""

import argparse
import asyncio
import json
import os
import resource
import socket
import ssl
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.loop import run
from shoal.protocol.live.redial import hivemind_id
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members

ATTACKS = ("peace", "opened", "hello", "idle", "stuck", "all")
GOAL_MS = 250.0
RUN = "f100d"
ATTACKERS = {attack: f"127.0.0.{60 + number}" for number, attack in enumerate(ATTACKS)}
"""Each attack comes from one address, of its own: who was shut out in one is nobody yet in the next. Members are at
127.0.0.1."""
ONSET_S = 6.0
"""The attacker starts within these. Its first strike is told apart from the attack: nobody is known by then."""
CALL_EVERY_S = 0.02
DIAL_EVERY_S = 1.0
TIMEOUT_S = 10.0


# The member that is flooded


async def member(folder: Path) -> None:
    transport = await LiveTransport.start(
        Identity.generate(), members=Members(RUN, PeerID(""), is_open=True), state_dir=folder
    )

    async def echo(_source: PeerID, request: bytes) -> bytes:
        return request

    async def ignore(*_: Any) -> None: ...

    transport.serve(on_call=echo, on_frame=ignore)
    daemon = transport.daemon.process_id
    print(json.dumps({"peer": transport.peer_id, "addresses": transport.addresses(), "daemon": daemon}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await transport.close()


# The attacker


def client_hello() -> bytes:
    """What libp2p's TLS over TCP begins with, both agreements on a protocol included."""
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    said = (b"/multistream/1.0.0\n", b"/tls/1.0.0\n")
    return b"".join(bytes((len(text),)) + text for text in said) + outgoing.read()


async def attack(attack: str, port: int, rate: float, number: int) -> None:
    """Until this process is ended. Writes how many connections it has opened, and how many stand, every second."""
    begin = client_hello()
    standing: set[socket.socket] = set()
    opened = 0
    loop = asyncio.get_running_loop()

    async def open_one(data: bytes, *, stays: bool) -> None:
        nonlocal opened
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        with link:
            try:
                link.bind((ATTACKERS[attack], 0))
                async with asyncio.timeout(2.0):
                    await loop.sock_connect(link, ("127.0.0.1", port))
                opened += 1
                standing.add(link)
                if data:
                    await loop.sock_sendall(link, data)
                if stays or data:  # or the signature is never asked for
                    async with asyncio.timeout(None if stays else 0.3):
                        while await loop.sock_recv(link, 65536):
                            pass
            except (OSError, TimeoutError):
                pass
            finally:
                standing.discard(link)

    async def hold(data: bytes) -> None:
        while True:
            await open_one(data, stays=True)
            await asyncio.sleep(0.05)

    async def flood(data: bytes) -> None:
        tasks: set[asyncio.Task[None]] = set()
        begun_s, due = time.monotonic(), 0
        while True:
            for _ in range(int((time.monotonic() - begun_s) * rate) - due):
                due += 1
                if len(tasks) < 4000:
                    task = asyncio.create_task(open_one(data, stays=False))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.005)

    work = []
    if attack in ("opened", "hello", "all"):
        work.append(asyncio.create_task(flood(b"" if attack == "opened" else begin)))
    if attack in ("idle", "stuck", "all"):
        work += [asyncio.create_task(hold(b"" if attack == "idle" else begin)) for _ in range(number)]
    while True:
        await asyncio.sleep(1.0)
        print(json.dumps({"opened": opened, "standing": len(standing)}), flush=True)


# The member that calls


@asynccontextmanager
async def child(*words: str) -> AsyncIterator[subprocess.Popen[str]]:
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        if words[0] == "attacker":
            process.kill()
        process.stdin.close()  # type: ignore[union-attr]
        await asyncio.to_thread(process.wait)


async def calls(transport: LiveTransport, peer: PeerID, seconds: float) -> list[float]:
    """How long each took."""
    took: list[float] = []
    tasks = set()

    async def one() -> None:
        begun_s = time.monotonic()
        with suppress(Unreachable):
            await transport.call(peer, b"x" * 64, timeout_s=TIMEOUT_S)
        took.append(time.monotonic() - begun_s)

    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(CALL_EVERY_S)
    await asyncio.gather(*tasks)
    return took


async def dials(transport: LiveTransport, peer: PeerID, seconds: float) -> list[float]:
    """How long each call over a new connection took. One that fails is tried again, and counts until it succeeds."""
    took: list[float] = []
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        p2p = await transport.daemon.p2p()
        with suppress(Exception):
            await p2p._client.disconnect(hivemind_id(peer))
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + TIMEOUT_S:
            with suppress(Unreachable):
                await transport.call(peer, b"x", timeout_s=TIMEOUT_S)
                break
        took.append(time.monotonic() - begun_s)
        await asyncio.sleep(DIAL_EVERY_S)
    return took


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    async with child("member", str(folder / "flooded")) as flooded:
        told = json.loads(await asyncio.to_thread(flooded.stdout.readline))  # type: ignore[union-attr]
        daemon, port = psutil.Process(told["daemon"]), int(told["addresses"][0].split("/")[4])
        callers = [
            await LiveTransport.start(
                Identity.generate(),
                members=Members(RUN, PeerID(""), is_open=True),
                state_dir=folder / f"caller-{number}",
            )
            for number in range(2)
        ]

        async def nothing(*_: Any) -> bytes:
            return b""

        for caller in callers:
            caller.serve(on_call=nothing, on_frame=nothing)  # type: ignore[arg-type]
            await caller.introduce(told["peer"], told["addresses"])
            await caller.call(told["peer"], b"", timeout_s=TIMEOUT_S)
        for attack in options.attacks:
            async with child("attacker", attack, str(port), str(options.rate), str(options.number)) as attacker:
                onset = asyncio.create_task(calls(callers[0], told["peer"], ONSET_S))
                if attack == "peace":
                    attacker.kill()
                else:
                    await asyncio.to_thread(attacker.stdout.readline)  # type: ignore[union-attr]
                first = await onset
                cpu_s, begun_s = sum(daemon.cpu_times()[:2]), time.monotonic()
                took, dialled = await asyncio.gather(
                    calls(callers[0], told["peer"], options.seconds), dials(callers[1], told["peer"], options.seconds)
                )
                seconds = time.monotonic() - begun_s
                row = {
                    "calls": len(took),
                    "call_p50_ms": statistics.median(took) * 1e3,
                    "call_p99_ms": percentile(took, 0.99),
                    "onset_worst_ms": max(first) * 1e3,
                    "dial_p50_ms": statistics.median(dialled) * 1e3,
                    "dial_worst_ms": max(dialled) * 1e3,
                    "daemon_cores": (sum(daemon.cpu_times()[:2]) - cpu_s) / seconds,
                    "daemon_files": daemon.num_fds(),
                    "daemon_mib": daemon.memory_info().rss / 2**20,
                }
                attacker.kill()
                lines = [json.loads(line) for line in attacker.stdout.read().splitlines()]  # type: ignore[union-attr]
                if lines:
                    row["opened_per_s"] = lines[-1]["opened"] / len(lines)
                    row["standing"] = lines[-1]["standing"]
            rows[attack] = row
            print(attack.ljust(8), " ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
        for caller in callers:
            await caller.close()
    return rows


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # Go's programs, as the daemon is, do so by themselves
    if sys.argv[1:2] == ["member"]:
        run(member(Path(sys.argv[2])))
        return
    if sys.argv[1:2] == ["attacker"]:
        run(attack(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack")
    parser.add_argument("--rate", type=float, default=1000.0, help="connections a second")
    parser.add_argument("--number", type=int, default=1000, help="connections that stand")
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run(measure(options, Path(folder)))
    worst = max(row["call_p99_ms"] for row in rows.values())
    print(f"worst call p99 {worst:.0f} ms, goal {GOAL_MS:.0f} ms; {os.cpu_count()} cores")
    if options.json:
        options.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
