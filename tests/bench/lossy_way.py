"""How soon a frame is there over a way that loses packets, alone, and what a probe of that way sees.

Two peers in network namespaces with an emulated internet between them (`tests/lab/internet`). One sends the other a
frame of an activation's size now and then, and asks when it has come; and in between what `peer/compute/probe.py` sends
first: 128 KiB, a mark, and 128 KiB more, which the receiver times from the mark on. Needs what the lab needs.

    python tests/bench/lossy_way.py [--loss 0.01] [--ms 30] [--up 20] [--rounds 8]
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
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members
from shoal.protocol.ports import Payload, Priority

PROBE_BYTES = 128 * 1024
ACTIVATION_BYTES = 66_560
ACTIVATIONS_A_ROUND = 3
APART_S = 0.3
REST_S = 1.5
"""Before a round's activations. After so long TCP begins anew."""


class Receiver:
    """Answers a call with the seconds from the last mark to the frame that ended what came."""

    def __init__(self) -> None:
        self._marked_s = 0.0
        self._took_s: asyncio.Queue[float] = asyncio.Queue()

    async def on_frame(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        if meta == b"mark":
            self._marked_s = time.monotonic()
        elif meta == b"end":
            self._took_s.put_nowait(time.monotonic() - self._marked_s)

    async def on_call(self, source: PeerID, request: bytes) -> bytes:
        return json.dumps(await self._took_s.get() if request == b"took" else 0.0).encode()


async def start(folder: Path, initial_peers: tuple[str, ...] = ()) -> LiveTransport:
    transport = await LiveTransport.start(
        Identity.generate(),
        members=Members("bench", PeerID(""), is_open=True),
        state_dir=folder,
        listen=("/ip4/0.0.0.0/tcp/0",),
        initial_peers=initial_peers,
        use_relay=False,
    )
    receiver = Receiver()
    transport.serve(on_call=receiver.on_call, on_frame=receiver.on_frame)
    return transport


async def receive(folder: Path) -> None:
    transport = await start(folder)
    print(next(each for each in transport.addresses() if "/127." not in each), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def send(folder: Path, address: str, num_rounds: int) -> None:
    transport = await start(folder, (address,))
    peer = PeerID(address.rpartition("/")[2])
    await asyncio.sleep(1.0)
    await transport.call(peer, b"warm", timeout_s=20)

    async def timed(ahead: int, nbytes: int) -> float:
        """Returns: what the receiver says of the last frame."""
        for meta, count in ((b"", ahead), (b"mark", 1), (b"end", nbytes)):
            if count:
                await transport.send(peer, meta, bytes(count), priority=Priority.BULK)
        return float(json.loads(await transport.call(peer, b"took", timeout_s=60)))

    mbit_s, took_s = [], []
    for _ in range(num_rounds):
        mbit_s.append(PROBE_BYTES * 8 / 1e6 / await timed(PROBE_BYTES, PROBE_BYTES))
        await asyncio.sleep(REST_S)
        for _ in range(ACTIVATIONS_A_ROUND):
            begun_s = time.monotonic()
            await timed(0, ACTIVATION_BYTES)
            took_s.append(time.monotonic() - begun_s)
            await asyncio.sleep(APART_S)
    print(json.dumps((mbit_s, took_s)), flush=True)
    await transport.close()


async def measure(options: argparse.Namespace, folder: Path) -> None:
    line = Line(up_mbps=options.up, loss=options.loss / 2)
    lines = {"sender": line, "receiver": line}
    async with Internet(lines, {name: name for name in lines}, lambda a, b: PathBetween(options.ms)) as internet:
        words = [sys.executable, __file__, "--rounds", str(options.rounds)]
        process = await internet.start("receiver", [*words, "--receive", str(folder / "receiver")])
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        process = await internet.start("sender", [*words, "--send", address, "--folder", str(folder / "sender")])
        assert process.stdout is not None
        mbit_s, took_s = map(sorted, json.loads(await process.stdout.readline()))
    print(
        f"a frame of {ACTIVATION_BYTES} bytes and the way back: median {statistics.median(took_s):.3f} s, "
        f"p90 {took_s[int(len(took_s) * 0.9)]:.3f}, worst {took_s[-1]:.3f}\n"
        f"what a probe sees: median {statistics.median(mbit_s):.1f} Mbit/s, {mbit_s[0]:.1f} to {mbit_s[-1]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", type=float, default=0.01, help="of packets, half of it on each line")
    parser.add_argument("--ms", type=float, default=30.0, help="one way")
    parser.add_argument("--up", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive is not None:
        run(receive(options.receive))
    elif options.send is not None:
        run(send(options.folder, options.send, options.rounds))
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            asyncio.run(measure(options, Path(folder)))


if __name__ == "__main__":
    main()
