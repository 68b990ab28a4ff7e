"""Pieces go to each mate by themselves, and are made into bytes once."""

import asyncio

import pytest
import torch

from shoal.peer.base.tasks import Tasks
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.group.pieces import Pieces
from shoal.peer.group.reduce import Outgoing
from shoal.protocol.errors import Unreachable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import GatherPart, RoundMember, RoundStart

MATES = [PeerID(name) for name in ("stalls", "is lost", "takes")]
START = RoundStart(
    stage=0,
    step=3,
    attempt=1,
    members=(RoundMember(PeerID("me"), 1.0, b""),),
    duplicates=0,
    given_up=0,
    loss_sum=0.0,
    staleness_sum=0,
)


class Wire:
    """Of three mates one takes nothing, one cannot be reached, and one takes all."""

    def __init__(self):
        self.sent = []
        self.never = asyncio.Event()

    async def send(self, target, meta, payload, *, priority):
        if target == "stalls":
            await self.never.wait()
        if target == "is lost":
            raise Unreachable(target, "it is gone")
        self.sent.append((target, meta.start, bytes(payload)))


class CountingVectors(Vectors):
    encoded = 0

    def piece_payload(self, values_C, form, key):
        self.encoded += 1
        return super().piece_payload(values_C, form, key)


class Clock:
    def now_s(self):
        return 0.0


class Host:
    async def run_on_host(self, work):
        await asyncio.sleep(0)
        return work()


@pytest.mark.parametrize("form", ["fp32", "bf16", "hadamard4"])
def test_a_mate_that_stalls_holds_up_no_other_and_each_piece_is_encoded_once(form):
    async def main():
        failures = []
        vectors = CountingVectors(torch.device("cpu"), sums=(form,))
        wire, tasks = Wire(), Tasks(failures.append)
        pieces = Pieces(wire, vectors, tasks, Clock(), Host())
        chunks = {start: torch.arange(4.0) + start for start in (0, 4)}
        outgoing = [Outgoing(mate, start, chunks[start], form) for start in chunks for mate in MATES]
        pieces.send(outgoing, START, GatherPart)
        for _ in range(40):
            await asyncio.sleep(0)
        plain = Vectors(torch.device("cpu"), sums=(form,))
        payloads = {start: bytes(plain.piece_payload(chunks[start], form, (0, 0))) for start in (0, 4)}
        assert wire.sent == [("takes", start, payload) for start, payload in payloads.items()]
        assert vectors.encoded == 2
        assert [pieces.is_sending_to(mate) for mate in MATES] == [True, False, False]
        wire.never.set()
        await tasks.wait()
        assert [start for target, start, _ in wire.sent if target == "stalls"] == [0, 4]
        assert not any(pieces.is_sending_to(mate) for mate in MATES)
        assert failures == []

    asyncio.run(main())
