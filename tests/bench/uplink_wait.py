"""How long a call waits behind a peer's own bulk, and how much of its uplink the bulk gets.

Peers in network namespaces with an emulated internet between them (`tests/lab/internet`). One sends frames of 1 MiB to
all others as fast as they go, and calls one of them ten times a second, as a heartbeat does. Needs what the lab needs.

    python tests/bench/uplink_wait.py [--up 20] [--queue 100] [--ms 15] [--loss P] [--peers 2] [--fall 5] [--down N]
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "lab"))
from internet.emulator import Internet, Line, PathBetween
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members
from shoal.protocol.ports import Payload, Priority

FRAME_BYTES = 1 << 20
CALLS_APART_S = 0.1
BEGUN_BYTES = 200_000
"""More than what peers say to each other before the first frame."""


async def start(folder: Path, initial_peers: tuple[str, ...] = ()) -> LiveTransport:
    async def on_frame(source: PeerID, meta: bytes, payload: Payload) -> None:
        pass

    async def on_call(source: PeerID, request: bytes) -> bytes:
        return request

    transport = await LiveTransport.start(
        Identity.generate(),
        members=Members("bench", PeerID(""), is_open=True),
        state_dir=folder,
        listen=("/ip4/0.0.0.0/tcp/0",),
        initial_peers=initial_peers,
        use_relay=False,
    )
    transport.serve(on_call=on_call, on_frame=on_frame)
    return transport


async def receive(folder: Path) -> None:
    transport = await start(folder)
    address = next(each for each in transport.addresses() if "/127." not in each)
    print(address, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def send(folder: Path, addresses: list[str], seconds: float) -> None:
    transport = await start(folder, tuple(addresses))
    peers = [PeerID(address.rpartition("/")[2]) for address in addresses]
    payload, took = bytes(FRAME_BYTES), []
    await asyncio.sleep(1.0)
    for peer in peers:
        await transport.call(peer, b"warm", timeout_s=20)

    async def bulk(peer: PeerID) -> None:
        while True:
            await transport.send(peer, b"", payload, priority=Priority.BULK)

    async def call() -> None:
        at_s = time.monotonic()
        try:
            await transport.call(peers[0], bytes(500), timeout_s=60)
        except Unreachable:
            return
        took.append((at_s - begun_s, time.monotonic() - at_s))

    begun_s = time.monotonic()
    sending = [asyncio.create_task(bulk(peer)) for peer in peers]
    calling = []
    while time.monotonic() < begun_s + seconds:
        calling.append(asyncio.create_task(call()))
        await asyncio.sleep(CALLS_APART_S)
    await asyncio.wait(calling, timeout=30)
    for task in (*sending, *calling):
        task.cancel()
    print(json.dumps(took), flush=True)


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Print what each half of the time was like."""
    receivers = [f"receiver{number}" for number in range(options.peers)]
    other = Line(loss=options.loss / 2)
    lines = {"sender": Line(up_mbps=options.up, queue_ms=options.queue, loss=options.loss / 2)}
    lines |= dict.fromkeys(receivers, other)
    if options.down:
        lines[receivers[-1]] = Line(down_mbps=options.down, loss=options.loss / 2)
    halves = []
    async with Internet(lines, {name: name for name in lines}, lambda a, b: PathBetween(options.ms)) as internet:
        addresses = []
        for name in receivers:
            process = await internet.start(name, [sys.executable, __file__, "--receive", str(folder / name)])
            assert process.stdout is not None
            addresses.append((await process.stdout.readline()).decode().strip())
        words = ["--seconds", str(options.seconds), "--send", *addresses, "--folder", str(folder / "sender")]
        process = await internet.start("sender", [sys.executable, __file__, *words])
        assert process.stdout is not None
        while (await internet.stats("sender")).up_bytes < BEGUN_BYTES:  # noqa: ASYNC110 - the router wakes nobody
            await asyncio.sleep(0.02)
        for half in range(2):
            before = await internet.stats("sender")
            await asyncio.sleep(options.seconds / 2 - (0.5 if half else 0.0))
            after = await internet.stats("sender")
            halves.append((after.up_bytes - before.up_bytes, after.up_dropped - before.up_dropped))
            if not half and options.fall:
                await internet.set("sender", "up_mbps", options.fall)
        took = json.loads(await process.stdout.readline())
    for half, (nbytes, dropped) in enumerate(halves):
        begin_s, end_s = options.seconds / 2 * half, options.seconds / 2 * (half + 1)
        calls = sorted(took_s for at_s, took_s in took if begin_s <= at_s < end_s)
        mbit_s = nbytes * 8 / 1e6 / (options.seconds / 2 - (0.5 if half else 0.0))
        print(
            f"half {half + 1}: {mbit_s:.2f} Mbit/s, {dropped} dropped, {len(calls)} calls: median "
            f"{statistics.median(calls):.3f}, p95 {calls[int(len(calls) * 0.95)]:.3f}, worst {calls[-1]:.3f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=float, default=20.0)
    parser.add_argument("--down", type=float, default=0.0, help="of the last receiver")
    parser.add_argument("--fall", type=float, default=0.0, help="what the uplink has in the second half")
    parser.add_argument("--queue", type=float, default=100.0)
    parser.add_argument("--ms", type=float, default=15.0, help="one way")
    parser.add_argument("--loss", type=float, default=0.0, help="of packets between any two, half of it on each line")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        run(receive(options.receive))
    elif options.send is not None:
        run(send(options.folder, options.send, options.seconds))
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
