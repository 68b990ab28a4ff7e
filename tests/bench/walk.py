"""What one microbatch costs in calls: 3 stages of 2 replicas in virtual time under one plan, counted in steady state.

    python tests/bench/walk.py                    # the table
    python tests/bench/walk.py --most 40          # and the functions that are called most
    python tests/bench/walk.py --json FILE

Everything is counted over some steps and divided by their microbatches: calls of Python functions of this project
(without the simulated world and the commands around it; a coroutine that goes on counts as called again), calls to
other peers, Ed25519 signatures made. `functions`, `classes` and `files` are how many different ones took part. Nothing
here depends on the machine or on what else it does: one commit gives one table.
"""

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from open_gate import OpenGate
from tiny_run import tiny_corpus, tiny_spec

import shoal.protocol
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.driver import PeerDriver
from shoal.peer.links.meter import LinkMeter
from shoal.peer.presence.own_word import Claims
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Watcher
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.messages import CommitReport
from shoal.protocol.plan import Member, Plan, Stage, sign_plan
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.transport import SimTransport
from shoal.protocol.sim.world import SimPeer, World
from shoal.protocol.spec import run_id

STAGES, REPLICAS, MICROBATCHES = 3, 2, 24
WARM_UP_STEPS = 6
LATENCY_S = 0.05
LINK_BYTES_PER_S = 1e7
DEVICE_FLOP_PER_S = 4e7
ROOT = Path(shoal.protocol.__file__ or "").resolve().parent.parent
AROUND = ("protocol/sim/", "deploy/", "tests/")
PARTS = (
    ("pipeline", ("peer/pipeline/", "peer/replica/schedule.py")),
    ("group", ("peer/group/", "peer/replica/group_core.py", "peer/replica/member.py")),
    ("supply", ("peer/replica/microbatch_queue",)),
    ("replica", ("peer/replica/", "peer/membership/group_membership.py")),
    ("model and kernels", ("peer/model/", "peer/data/", "kernels/")),
    ("rest of the peer", ("peer/",)),
    ("protocol", ("protocol/",)),
    ("coordination", ("coordinator/",)),
)
"""The first that a file's path begins with."""


@dataclass
class Figures:
    """Per microbatch, except for what is counted once."""

    calls: float
    remote_calls: float
    signatures: float
    functions: int
    classes: int
    files: int
    parts: dict[str, float]
    asked: dict[str, float]
    """Remote calls by the message that they carry."""
    losses: list[float]


class Profile:
    """Counts calls while it is `on`."""

    def __init__(self) -> None:
        self.codes: Counter[CodeType] = Counter()
        self.asked: Counter[str] = Counter()

    @contextmanager
    def on(self) -> Iterator[None]:
        ask = Endpoint.ask

        def counted(endpoint: Endpoint, peer: PeerID, message: Any, *rest: Any, **options: Any) -> Any:
            self.asked[type(message).__name__] += peer != endpoint.peer_id
            return ask(endpoint, peer, message, *rest, **options)

        Endpoint.ask = counted  # type: ignore[method-assign, assignment]
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            Endpoint.ask = ask  # type: ignore[method-assign]

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.codes[frame.f_code] += 1

    def named(self, *names: str) -> int:
        """Calls of functions with one of these qualified names, wherever they are."""
        return sum(count for code, count in self.codes.items() if code.co_qualname in names)

    def ours(self) -> dict[CodeType, str]:
        """Of each function that was called and is counted: its file, as the project names it."""
        found = {}
        for code in self.codes:
            path = Path(code.co_filename)
            if path.is_absolute() and path.is_relative_to(ROOT):
                name = path.relative_to(ROOT).as_posix()
                if not name.startswith((*AROUND, ".venv/")):
                    found[code] = name
        return found


def class_of(code: CodeType) -> str | None:
    """The class in whose body a function is, or the class that surrounds the function in which it is."""
    names = [name for name in code.co_qualname.split(".") if name != "<locals>"]
    return next((name for name in names[:-1] if name.lstrip("_")[:1].isupper()), None)


async def walk(steps: int) -> tuple[Profile, list[float]]:
    """Peers under one plan, which nobody changes."""
    total = WARM_UP_STEPS + steps + 1
    spec = tiny_spec(
        steps=total,
        peers=STAGES * REPLICAS,
        stages=STAGES,
        s_max=1,
        microbatches=MICROBATCHES,
        snapshot_interval_steps=0,
    )
    world = World(0, uniform(LATENCY_S, LINK_BYTES_PER_S), acquainted=True)
    peers = [
        world.add_peer(f"peer{number}", device_flop_per_s=DEVICE_FLOP_PER_S) for number in range(STAGES * REPLICAS)
    ]
    run_name = run_id(spec, peers[0].peer_id)
    losses: dict[int, float] = {}
    reached: Counter[int] = Counter()
    warm, over = asyncio.Event(), asyncio.Event()

    def on_commit(report: CommitReport) -> None:
        reached[report.stage] = report.step + 1
        if report.loss is not None:
            losses[report.step] = report.loss
        everywhere = min(reached[stage] for stage in range(STAGES))
        if everywhere >= WARM_UP_STEPS:
            warm.set()
        if everywhere >= WARM_UP_STEPS + steps:
            over.set()

    async def make(peer: SimPeer) -> PeerDriver:
        driver = PeerDriver(
            Ports(
                endpoint=Endpoint(peer.identity, peer.transport, run=run_name, gate=OpenGate()),
                compute=peer.compute,
                clock=peer.clock,
                meter=LinkMeter(peer.clock),
            ),
            spec=spec,
            arithmetic=Arithmetic(spec, tiny_corpus(), torch.device("cpu")),
            claims=Claims(memory_bytes=1 << 30),
            watcher=Watcher(on_commit=on_commit),
        )
        await driver.start()
        return driver

    drivers = [await peer.spawn(make(peer)) for peer in peers]
    members = [Member(peer.peer_id, 1.0, 1.0, 1) for peer in peers]
    stages = tuple(
        Stage(stage, stage + 1, tuple(members[stage * REPLICAS : (stage + 1) * REPLICAS])) for stage in range(STAGES)
    )
    plan = Plan(
        run=run_name, term=1, sequence=1, previous="", coordinator=peers[0].peer_id, stages=stages, not_started=True
    )
    signed = sign_plan(peers[0].identity, plan)
    for peer, driver in zip(peers, drivers, strict=True):
        peer.context().run(driver.obey, signed)

    await warm.wait()
    profile = Profile()
    with profile.on():
        await over.wait()
    assert world.failures == []
    for peer, driver in zip(peers, drivers, strict=True):
        await peer.spawn(driver.close())
    return profile, [losses[step] for step in range(WARM_UP_STEPS + steps)]


def figures_of(profile: Profile, losses: list[float], steps: int) -> Figures:
    microbatches, ours = steps * MICROBATCHES, profile.ours()
    parts: Counter[str] = Counter()
    for code, name in ours.items():
        part = next(part for part, begins in PARTS if name.startswith(begins))
        parts[part] += profile.codes[code]
    return Figures(
        calls=sum(profile.codes[code] for code in ours) / microbatches,
        remote_calls=profile.named(f"{SimTransport.__name__}._accept_call") / microbatches,
        signatures=profile.named(f"{Identity.__name__}.sign") / microbatches,
        functions=len(ours),
        classes=len({(name, class_of(code)) for code, name in ours.items() if class_of(code)}),
        files=len(set(ours.values())),
        parts={part: parts[part] / microbatches for part, _ in PARTS},
        asked={kind: count / microbatches for kind, count in profile.asked.most_common()},
        losses=losses,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help=f"to count, of {MICROBATCHES} microbatches each")
    parser.add_argument("--most", type=int, default=0, help="also show so many functions, the most called ones first")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    profile, losses = run(walk(arguments.steps))
    figures = figures_of(profile, losses, arguments.steps)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(figures)) + "\n")
    print(f"{STAGES} stages of {REPLICAS} replicas, {arguments.steps} steps of {MICROBATCHES} microbatches")
    print(f"Python calls a microbatch     {figures.calls:8.0f}  (goal 900)")
    for part, calls in figures.parts.items():
        print(f"  {part:<27} {calls:8.0f}")
    print(f"remote calls                  {figures.remote_calls:8.2f}  (goal 3)")
    for kind, calls in figures.asked.items():
        print(f"  {kind:<27} {calls:8.2f}")
    print(f"Ed25519 signatures            {figures.signatures:8.2f}  (goal 4)")
    print(f"functions, classes, files     {figures.functions:8} {figures.classes} {figures.files}  (goal 30 classes)")
    ours = profile.ours()
    for code, count in profile.codes.most_common():
        if code in ours and arguments.most > 0:
            arguments.most -= 1
            print(f"{count / arguments.steps / MICROBATCHES:8.2f}  {ours[code]}  {code.co_qualname}")


if __name__ == "__main__":
    main()
