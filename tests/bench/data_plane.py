"""How fast tensors travel: `LiveTransport.send` against hivemind's raw binary stream, between the same two daemons.

Two processes on loopback, uvloop, rounds of both kinds in turn so that whatever else the machine does hits both. The
raw stream gets what we know to be its best: one `write` and `drain` a tensor, `readexactly` on the reader that hivemind
hands out (a larger buffer, 1 to 16 MiB, was no faster). It has no checksum, no credit, no priority and no header.

    python tests/bench/data_plane.py [--rounds N] [--json FILE]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID

from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.live.loop import run
from shoal.protocol.live.transport import LiveTransport
from shoal.protocol.membership import Members
from shoal.protocol.ports import Payload, Priority

TENSOR_BYTES = 16 * 1024 * 1024
TENSORS_A_ROUND = 12
RAW_HANDLER = "raw"


class Receiver:
    """Answers a call once it has handled every frame of the round."""

    def __init__(self) -> None:
        self.arrived = asyncio.Semaphore(0)

    async def on_frame(self, source: PeerID, meta: bytes, payload: Payload) -> None:
        assert len(payload) == TENSOR_BYTES
        self.arrived.release()

    async def on_call(self, source: PeerID, request: bytes) -> bytes:
        for _ in range(TENSORS_A_ROUND):
            await self.arrived.acquire()
        return b""

    @staticmethod
    async def on_raw_stream(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                for _ in range(TENSORS_A_ROUND):
                    await reader.readexactly(TENSOR_BYTES)
                writer.write(b"k")
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()


async def start(folder: Path, initial_peers: tuple[str, ...] = ()) -> LiveTransport:
    return await LiveTransport.start(
        Identity.generate(),
        members=Members("bench", PeerID(""), is_open=True),
        state_dir=folder,
        initial_peers=initial_peers,
        use_relay=False,
    )


async def receive(folder: Path) -> None:
    """Serve until standard input ends."""
    transport = await start(folder)
    receiver = Receiver()
    transport.serve(on_call=receiver.on_call, on_frame=receiver.on_frame)
    p2p = await transport.daemon.p2p()
    await p2p.add_binary_stream_handler(RAW_HANDLER, Receiver.on_raw_stream)
    print(transport.addresses()[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


async def measure(folder: Path, address: str, num_rounds: int) -> dict[str, Any]:
    peer = PeerID(address.rpartition("/")[2])
    transport = await start(folder, (address,))
    receiver = Receiver()
    transport.serve(on_call=receiver.on_call, on_frame=receiver.on_frame)
    p2p = await transport.daemon.p2p()
    _, reader, writer = await p2p.call_binary_stream_handler(HivemindPeerID.from_base58(peer), RAW_HANDLER)
    tensor = memoryview(bytearray(range(256)) * (TENSOR_BYTES // 256))

    async def ours() -> None:
        for _ in range(TENSORS_A_ROUND):
            await transport.send(peer, b"meta", tensor, priority=Priority.ACTIVATION)
        await transport.call(peer, b"", timeout_s=60)

    async def raw() -> None:
        for _ in range(TENSORS_A_ROUND):
            writer.write(tensor)
            await writer.drain()
        await reader.readexactly(1)

    mib_s: dict[str, list[float]] = {"ours": [], "raw": []}
    for number in range(num_rounds + 1):
        for name, kind in (("ours", ours), ("raw", raw)) if number % 2 else (("raw", raw), ("ours", ours)):
            began_s = time.perf_counter()
            await kind()
            if number:  # the first round warms up
                mib_s[name].append(TENSOR_BYTES * TENSORS_A_ROUND / 2**20 / (time.perf_counter() - began_s))
    writer.close()
    await transport.close()
    ours_mib_s, raw_mib_s = (statistics.median(mib_s[name]) for name in ("ours", "raw"))
    return {
        "tensor_mib": TENSOR_BYTES // 2**20,
        "rounds": num_rounds,
        "ours_mib_s": round(ours_mib_s, 1),
        "raw_mib_s": round(raw_mib_s, 1),
        "ratio": round(ours_mib_s / raw_mib_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive is not None:
        run(receive(arguments.receive))
        return
    with tempfile.TemporaryDirectory() as folder:
        receiver = subprocess.Popen(
            [sys.executable, __file__, "--receive", f"{folder}/receiver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert receiver.stdin is not None
            assert receiver.stdout is not None
            address = receiver.stdout.readline().strip()
            result = run(measure(Path(folder) / "sender", address, arguments.rounds))
        finally:
            receiver.communicate()
    print(f"ours {result['ours_mib_s']} MiB/s, raw {result['raw_mib_s']} MiB/s, ratio {result['ratio']}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
