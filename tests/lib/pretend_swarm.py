"""A swarm that is not there, for whoever works on the dashboard's page, for its tests and for its pictures.

    python tests/lib/pretend_swarm.py --peers 200 --stages 12

It says every second what a peer and its coordinator would say. The same seed tells the same story.
"""

import argparse
import asyncio
import hashlib
import math
import random
import time
from collections.abc import Sequence

import msgspec

from shoal.deploy.dashboard.address import DEFAULT, parse_address
from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.dashboard.server import Dashboard, DashboardServer
from shoal.deploy.record.report import Contribution, Joined, LimitsNow, Report, Status
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Comparison, ExpertStatus, PeerStatus, PlanNote, SwarmStatus

NAMES = (
    "ada", "brook", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "juno", "kelp", "lumen", "maple",
    "nova", "otter", "pine", "quartz", "reef", "sable", "tern", "umber", "vale", "willow", "xylem", "yarrow", "zephyr",
)  # fmt: skip
DEVICES = (
    ("NVIDIA GeForce RTX 4090", 82e12), ("NVIDIA GeForce RTX 3090", 35e12), ("NVIDIA GeForce RTX 3060", 12e12),
    ("NVIDIA A100-SXM4-80GB", 19.5e12), ("cpu", 0.4e12),
)  # fmt: skip
_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_PLANS = 16
_TERM_S = 60
_STEPS = 4000
_TOKENS_PER_S = 7200.0
_MICROBATCH = 1024
_ACTIVATION_BYTES = 2048


class Pretend:
    """Args: churn: how many peers a minute come, and as many go."""

    def __init__(self, *, peers: int, stages: int, seed: int = 0, churn: float = 1.0, experts: int = 0) -> None:
        self._rng = random.Random(seed)
        self._stages, self._churn, self._experts = stages, churn, experts
        self._size = peers
        self._count = 0
        self._second = 0
        self._step = 0.0
        self._plans: list[tuple[int, PlanNote]] = []
        self._peers: dict[PeerID, PeerStatus] = {}
        for _ in range(peers):
            self._join(seen=False)
        self._coordinator = min(self._peers)
        self.me = next(iter(self._peers))
        self._sent = self._flop = 0.0
        self._plan(f"first plan: {peers} peers on {stages} stages")

    def facts(self) -> RunFacts:
        return RunFacts(
            name="tiny-stories",
            steps=_STEPS,
            num_layers=2 * self._stages,
            tokens_per_step=16 * _MICROBATCH,
            tokens_per_microbatch=_MICROBATCH,
            activation_bytes_per_token=_ACTIVATION_BYTES,
        )

    def begin(self, feed: Feed, now_s: float, *, history_s: int) -> None:
        """Tell what was said in the last `history_s` seconds."""
        feed.take(Joined(peer=self.me, name=self._peers[self.me].name, invite=""), now_s - history_s)
        for second in range(history_s):
            self.tell(feed, now_s - history_s + second)

    def tell(self, feed: Feed, now_s: float) -> None:
        """What is said in one second."""
        for report in self._reports():
            feed.take(report, now_s)

    def _reports(self) -> list[Report]:
        self._second += 1
        self._step = min(self._step + _TOKENS_PER_S / (16 * _MICROBATCH), _STEPS)
        rng = self._rng
        if self._second % _TERM_S == 0:
            before, self._coordinator = self._coordinator, rng.choice(sorted(self._peers))
            self._plan(f"term {self._term}: hand-over from {before[-8:]}")
        if rng.random() < self._churn / 30:
            (self._go if len(self._peers) >= self._size else self._join)()
        for peer, status in self._peers.items():
            version = int(self._step) if status.stage is not None else -1
            synced = status.version >= 0 or rng.random() < 0.2
            self._peers[peer] = msgspec.structs.replace(
                status,
                version=version if synced else -1,
                synced=synced,
                seen_s_ago=4.0 + self._second % 7 if self._hangs(peer) else rng.random(),
                forward_s=status.forward_s * (1 + 0.02 * (rng.random() - 0.5)),
            )
        return [Status(status=self._status()), self._contribution()]

    @property
    def _term(self) -> int:
        return 1 + self._second // _TERM_S

    def _hangs(self, peer: PeerID) -> bool:
        """Now and then one in sixty says nothing for a while."""
        return peer != self.me and (int(hashlib.sha256(peer.encode()).hexdigest(), 16) + self._second // 20) % 61 == 0

    def _status(self) -> SwarmStatus:
        step = int(self._step)
        noise = self._rng.gauss(0.0, 0.02)
        # Powers of steps, as losses of language models fall.
        loss = 1.6 + 4.2 * (1 + self._step / 30) ** -0.45 + noise if step else None
        pace = 1.0 + 0.04 * math.sin(self._second / 17) + self._rng.gauss(0.0, 0.015)
        peers = tuple(
            sorted(self._peers.values(), key=lambda p: (self._stages if p.stage is None else p.stage, p.peer))
        )
        return SwarmStatus(
            run="4f7c21ab90de3365",
            name="tiny-stories",
            coordinator=self._coordinator,
            term=self._term,
            plan_sequence=len(self._plans),
            plan_reason=self._plans[-1][1].reason,
            step=step,
            steps=_STEPS,
            tokens_per_s=_TOKENS_PER_S * pace * min(1.0, self._second / 8),
            loss=loss,
            validation_loss=1.65 + 4.2 * (1 + (step // 50 * 50) / 30) ** -0.45 if step >= 50 else None,
            validation_step=step // 50 * 50 if step >= 50 else None,
            staleness_steps_mean=max(0.0, 0.31 + self._rng.gauss(0.0, 0.03)),
            stages=tuple((2 * stage, 2 * stage + 2) for stage in range(self._stages)),
            peers=peers,
            elapsed_s=float(self._second),
            left_s=(_STEPS - step) * 16 * _MICROBATCH / (_TOKENS_PER_S * pace),
            plans=tuple(
                msgspec.structs.replace(note, seconds_ago=float(self._second - second))
                for second, note in self._plans[-_PLANS:]
            ),
            experts=self._spread(peers),
            comparison=Comparison(
                foreseen_tokens_per_s=1.05 * _TOKENS_PER_S,
                sentence=f"foreseen {1.05 * _TOKENS_PER_S:,.0f} tokens/s, seen {_TOKENS_PER_S * pace:,.0f}, "
                "stage 0 bounds it (its devices compute)",
                seen_tokens_per_s=_TOKENS_PER_S * pace,
                steps=40,
                bound="compute",
            ),
        )

    def _contribution(self) -> Contribution:
        mine = self._peers[self.me]
        rate = _TOKENS_PER_S * _ACTIVATION_BYTES * mine.share
        near = [
            peer
            for peer in self._peers.values()
            if peer.stage is not None and mine.stage is not None and abs(peer.stage - mine.stage) <= 1 and peer != mine
        ]
        links = [
            (p.peer, rate * p.share, 0.9 * rate * p.share) if p.stage != mine.stage else (p.peer, 3e5, 3e5)
            for p in near
        ]
        self._sent += sum(sent for _, sent, _ in links)
        self._flop += 0.3 * mine.flop_per_s
        microbatches_per_s = _TOKENS_PER_S / _MICROBATCH * mine.share
        return Contribution(
            peer=self.me,
            name=mine.name,
            stage=mine.stage,
            synced=mine.synced,
            busy=0.62 + 0.05 * self._rng.random(),
            sending=0.41,
            waiting=0,
            flop_per_s=0.3 * mine.flop_per_s,
            microbatches_per_s=microbatches_per_s,
            flop_total=self._flop,
            microbatches_total=int(microbatches_per_s * self._second),
            sent_bytes_total=self._sent,
            received_bytes_total=0.9 * self._sent,
            links=tuple(links[:16]),
            memory_bytes=1_240_000_000,
            uptime_s=float(self._second),
            limits=LimitsNow(caps=("upload at most 100 Mbit/s", "80% of the device's time")),
        )

    def _join(self, *, seen: bool = True) -> None:
        rng, number = self._rng, self._count
        self._count += 1
        digest = hashlib.sha256(f"{number}".encode()).digest()
        peer = PeerID("12D3KooW" + "".join(_ALPHABET[byte % 58] for byte in digest * 2)[:44])
        counts = [sum(p.stage == stage for p in self._peers.values()) for stage in range(self._stages)]
        stage = counts.index(min(counts))
        device, flop_per_s = rng.choice(DEVICES)
        name = NAMES[number % len(NAMES)] + (f"-{number // len(NAMES) + 1}" if number >= len(NAMES) else "")
        self._peers[peer] = PeerStatus(
            peer=peer,
            name=name,
            device=device,
            stage=stage,
            version=-1 if seen else 0,
            synced=not seen,
            draining=False,
            seen_s_ago=0.1,
            forward_s=0.004 * math.sqrt(DEVICES[0][1] / flop_per_s) * (0.9 + 0.2 * rng.random()),
            window=6 if stage == 0 else 0,
            flop_per_s=flop_per_s * (0.9 + 0.2 * rng.random()),
        )
        self._share()
        if seen:
            self._plan(f"{peer[-8:]} joined")

    def _go(self) -> None:
        gone = self._rng.choice([peer for peer in sorted(self._peers) if peer != self.me])
        stage = self._peers.pop(gone).stage
        if not any(peer.stage == stage for peer in self._peers.values()):
            moved = next(p for p in self._peers.values() if sum(q.stage == p.stage for q in self._peers.values()) > 1)
            self._peers[moved.peer] = msgspec.structs.replace(moved, stage=stage)
        self._share()
        self._coordinator = self._coordinator if self._coordinator in self._peers else min(self._peers)
        self._plan(f"{gone[-8:]} left")

    def _share(self) -> None:
        for stage in range(self._stages):
            holders = [peer for peer in self._peers.values() if peer.stage == stage]
            total = sum(1 / peer.forward_s for peer in holders)
            for peer in holders:
                share = 1 / peer.forward_s / total
                self._peers[peer.peer] = msgspec.structs.replace(peer, share=share)

    def _plan(self, reason: str) -> None:
        note = PlanNote(self._term, len(self._plans) + 1, 0.0, self._coordinator, reason)
        self._plans.append((self._second, note))

    def _spread(self, peers: Sequence[PeerStatus]) -> tuple[ExpertStatus, ...]:
        """More copies where the load is, on the stage's members in turn."""
        rng = random.Random(1)
        experts = []
        for stage in range(self._stages):
            members = [at for at, peer in enumerate(peers) if peer.stage == stage]
            loads = [rng.lognormvariate(0.0, 0.5) for _ in range(self._experts)]
            for expert, load in enumerate(loads):
                copies = min(len(members), 1 + round(load))
                held = tuple(members[(expert + copy) % len(members)] for copy in range(copies))
                experts.append(ExpertStatus(stage=stage, expert=expert, load=load / sum(loads), holders=held))
        return tuple(experts)


async def serve(pretend: Pretend, address: str, *, history_s: int) -> None:
    """Until it is cancelled."""
    feed = Feed(pretend.facts(), title="a pretend swarm", wall_minus_clock_s=time.time() - time.monotonic())
    pretend.begin(feed, time.monotonic(), history_s=history_s)
    where = parse_address(address)
    server = DashboardServer(Dashboard(feed, now_s=time.monotonic, names=where.names), where)
    await server.start()
    try:
        print(server.url, flush=True)  # noqa: T201
        while True:
            await asyncio.sleep(1.0)
            pretend.tell(feed, time.monotonic())
    finally:
        await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Show a swarm that is not there.")
    parser.add_argument("--peers", type=int, default=6)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--experts", type=int, default=0, help="a stage")
    parser.add_argument("--churn", type=float, default=1.0, help="peers a minute")
    parser.add_argument("--history", type=int, default=900, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dashboard", default=DEFAULT)
    chosen = parser.parse_args()
    pretend = Pretend(
        peers=chosen.peers, stages=chosen.stages, seed=chosen.seed, churn=chosen.churn, experts=chosen.experts
    )
    asyncio.run(serve(pretend, chosen.dashboard, history_s=chosen.history))


if __name__ == "__main__":
    main()
