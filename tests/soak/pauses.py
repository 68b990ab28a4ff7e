"""Do pauses cost a swarm a microbatch, or stop it?

Small swarms of whole nodes in virtual time; up to half of the peers pause, for a moment or for half a minute.
Run by `make soak-pauses` (200 seeds, about four seconds each), or with less: `--seeds 10`. A line a seed;
`--first SEED --seeds 1` repeats it exactly. Exits with 1 if a commit lacked something or a swarm stood still.
"""

import argparse
import asyncio
import logging
import random
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "lib"))

from sightings import CommitSeen, Event
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec

from shoal.protocol.errors import LocalError
from shoal.protocol.messages import CommitReport
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform

STEPS = 20
MICROBATCHES = 6
TIMEOUT_S = 2000.0
"""Of virtual time: a step takes about two seconds."""


async def play(seed: int, reports: list[CommitReport]) -> int:
    """Returns: how many pauses there were. Raises: TimeoutError: it stands still. LocalError: a node failed."""
    rng = random.Random(seed)
    num_peers = rng.choice([4, 6, 7, 8])
    spec = tiny_spec(
        steps=STEPS, peers=num_peers, stages=rng.choice([2, 3]), s_max=rng.choice([0, 1]), microbatches=MICROBATCHES
    )

    def note(event: Event) -> None:
        if isinstance(event, CommitSeen):
            reports.append(event.report)

    swarm = SimSwarm(
        spec,
        tiny_corpus(),
        seed=seed,
        network=uniform(latency_s=rng.choice([0.01, 0.05, 0.2]), rate_bytes_per_s=1e7),
        device_flop_per_s=2e7,
        on_event=note,
    )
    for number in range(num_peers):
        await swarm.add(f"n{number}")
    await swarm.until(lambda: len(swarm.steps) > 1)
    paused: set[str] = set()
    pauses = 0
    async with asyncio.timeout(TIMEOUT_S):
        while len(swarm.steps) < STEPS - 1:
            await asyncio.sleep(rng.choice([0.3, 1.0, 3.0, 8.0, 15.0]))
            name = rng.choice(sorted(swarm.nodes))
            if name in swarm.ended:
                continue
            pausing, context = swarm.nodes[name].peer.pausing, swarm.world.peers[name].context()
            if name in paused:
                context.run(pausing.resume)
                paused.discard(name)
            elif len(paused) < num_peers // 2:
                context.run(pausing.pause)
                paused.add(name)
                pauses += 1
        for name in sorted(paused - swarm.ended):
            swarm.world.peers[name].context().run(swarm.nodes[name].peer.pausing.resume)
        await swarm.end(timeout_s=TIMEOUT_S)
    return pauses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    failed = []
    for seed in range(options.first, options.first + options.seeds):
        reports: list[CommitReport] = []
        try:
            verdict = f"{run(play(seed, reports))} pauses"
        except (TimeoutError, LocalError) as error:
            verdict = f"FAILED: {error!r}"
        bad = [r for r in reports if (r.microbatches, r.given_up, r.dissenting) != (MICROBATCHES, 0, 0)]
        twice = sum(r.duplicates for r in reports)
        if bad or "FAILED" in verdict:
            failed.append(seed)
        sys.stdout.write(f"seed {seed}: {verdict}, {len(bad)} commits lack something, {twice} microbatches twice\n")
        sys.stdout.flush()
    sys.stdout.write(f"{options.seeds} seeds, {len(failed)} failed {failed or ''}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
