"""What churn and a hot expert cost a mixture of experts: real drivers on modelled devices, beside published figures.

    python tests/bench/experts_elastic.py hot                       # half of all tokens want one expert
    python tests/bench/experts_elastic.py failures --models S,L     # 10 nodes down to 5; every 5 and every 40 minutes
    python tests/bench/experts_elastic.py failures --trace FILE.csv # and a recorded trace, capped at 10 nodes

The paper is Lazarus (arXiv 2407.04656): section 6.1 and table 1 have models, nodes and checkpoint intervals, figures 6,
7 and 9 what is compared with. `coordinator/experts/MEASURED.md` has the figures, and what was assumed.

`failures` plays one run a seed, with somebody dying every --apart seconds and two coming back in the end, and measures
how fast each number of nodes is and what each change costs. How long it is quiet in between changes neither, so that
time is put in afterwards: an hour of a simulated swarm takes half an hour of a core.
"""

import argparse
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from baselines.checkpointing import Account, Checkpointing, checkpointed

from shoal.coordinator.cost.placement import Placement
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.result import SimResult
from shoal.deploy.simulate.traces import load_trace, replay
from shoal.peer.model.layout import num_parameters
from shoal.protocol.spec import RunSpec
from shoal.protocol.topology import Topology, make_topology

NODES, SLOTS, LAYERS, CONTEXT = 10, 6, 12, 1024
SAMPLES_PER_DEVICE = 4
"""A step, in the paper. Ours has the same 40 in each of 4 rounds, and as many whoever dies."""
MICROBATCHES = 40
DEVICE_FLOP_PER_S = 10e12
"""Calibrated on one figure: Lazarus does 45 samples/s of GPT-M with ten RTX 3090 (section 6.2), ours with these."""
CARD_BYTES_PER_S = 12.5e9
"""Two devices a machine share 100 Gbit/s."""
STORAGE_BYTES_PER_S = 1.25e9
STATE_BYTES_PER_PARAMETER = 14.0
"""Two for the parameter, and twelve of the optimizer: an expert of GPT-S has 63 MiB in the paper."""
DETECT_S = 15.0
"""Until NCCL gives up: 10 to 20 s in the paper."""
LAZARUS_COMPUTES = 45.0 / 34.0
"""Times what DeepSpeed computes undisturbed, with GPT-M (section 6.2). The baseline here computes as fast as we do, so
that only the rest of a published figure can be compared."""
RESTARTS_S: Mapping[str, float] = {"kind": 30.0, "fitted": 80.0}
"""Of all processes. The paper does not say; 80 s make its DeepSpeed of its own speeds (2.8 times slower with GPT-S)."""


@dataclass(frozen=True, slots=True)
class Model:
    """Args: group_size: nodes that hold all experts once, with DeepSpeed's expert parallelism."""

    dim: int
    experts: int
    group_size: int
    published: tuple[str, str, str]
    """Lazarus over checkpointing: a death every 5 minutes, every 40, the trace."""


MODELS = {
    "S": Model(768, 8, 2, ("2.8", "1.6", "2.3")),
    "M": Model(1024, 12, 2, ("", "", "")),
    "L": Model(1024, 16, 4, ("5.7", "2.3", "3.4")),
}


def spec_of(model: Model, *, steps: int = 100_000) -> RunSpec:
    return msgspec.convert(
        {
            "model": {
                "vocab_size": 50_257,
                "dim": model.dim,
                "num_layers": LAYERS,
                "num_heads": model.dim // 64,
                "num_kv_heads": model.dim // 64,
                "ffn_dim": 8 * model.dim // 3,  # three matrices of it have as much as GPT-2's two
                "context": CONTEXT,
                "num_experts": model.experts,
                "experts_per_token": 1,
            },
            "optimizer": {"warmup_steps": 0},
            "training": {
                "steps": steps,
                "microbatches_per_step": MICROBATCHES,
                "microbatch_size": SAMPLES_PER_DEVICE,
                "s_max": 0,
            },
            "swarm": {"stages": 1, "min_peers": NODES, "expert_slots": SLOTS, "term_s": 600.0},
            "wire": {"gradients": "bf16"},
        },
        RunSpec,
    )


def machines(num_devices: int, flop_per_s: float) -> Topology:
    """Two devices each, at one switch."""
    card = np.arange(num_devices) // 2
    return make_topology(
        np.where(card[:, None] == card[None, :], 1e-5, 5e-5),
        np.full((num_devices, num_devices), CARD_BYTES_PER_S),
        flop_per_s=flop_per_s,
        memory_bytes=24e9,
        card=card,
        up_bytes_per_s=CARD_BYTES_PER_S,
        down_bytes_per_s=CARD_BYTES_PER_S,
    )


def played(model: Model, *, seed: int, seconds: float, churn: Sequence[Churn]) -> SimResult:
    """All nodes hold the one stage; where experts go the coordinators decide."""
    return run_modelled(
        ModelledRun(
            topology=machines(NODES, DEVICE_FLOP_PER_S),
            spec=spec_of(model),
            stages=Placement(stages=(tuple(range(NODES)),), bounds=(0, LAYERS)),
            seed=seed,
            churn=churn,
            limits=RunLimits(seconds=seconds),
            chunk_bytes=32 << 20,
            expert_loads=[1.0 / math.sqrt(rank) for rank in range(1, model.experts + 1)],
        )
    )


# --- a death, and another ---


@dataclass(frozen=True, slots=True)
class Change:
    """Somebody dies or comes."""

    nodes: int
    """From then on."""
    died: bool
    planned_s: float
    """Until a plan that knows of it is live."""
    lost_s: float
    """What the time until the next change has fewer steps, in seconds at the speed of `nodes`."""


@dataclass(slots=True)
class Measured:
    """Of one model, over all seeds."""

    rates: dict[int, list[float]] = field(default_factory=dict)
    """Nodes -> samples/s that they do undisturbed."""
    changes: list[Change] = field(default_factory=list)

    def rate(self, nodes: int) -> float:
        """With another number than was measured, as much a node as with the nearest that was."""
        nearest = min(self.rates, key=lambda n: abs(n - nodes))
        return statistics.mean(self.rates[nearest]) * nodes / nearest

    def lost_s(self, *, died: bool, nodes: int | None = None) -> float:
        """At a change to `nodes`, or at any."""
        seen = [c.lost_s for c in self.changes if c.died == died and nodes in (None, c.nodes)]
        return statistics.mean(seen) if seen else self.lost_s(died=died)

    def read(self, result: SimResult, churn: Sequence[Churn], end_s: float) -> None:
        at_s = [step.committed_at_s for step in result.steps]
        plans_s = [event.at_s for event in result.events if event.change == "plan"]
        phases: list[tuple[Churn | None, int, float, list[float]]] = []
        nodes = NODES
        for i, begin_s in enumerate((0.0, *(event.at_s for event in churn))):
            event, last_s = churn[i - 1] if i else None, churn[i].at_s if i < len(churn) else end_s
            nodes += 0 if event is None else 1 if event.kind == "add" else -1
            within = [s for s in at_s if begin_s < s <= last_s]
            phases.append((event, nodes, max((s for s in at_s if s <= begin_s), default=0.0), within))
            if len(within) > 4:
                # The second half goes steadily, but for a step or two in which something moves.
                step_s = statistics.median(b - a for a, b in pairwise(within[len(within) // 2 - 1 :]))
                self.rates.setdefault(nodes, []).append(MICROBATCHES * SAMPLES_PER_DEVICE / step_s)
        for event, nodes, before_s, within in phases:
            if event is not None:
                due_s = len(within) * MICROBATCHES * SAMPLES_PER_DEVICE / self.rate(nodes)
                planned_s = min(s for s in plans_s if s > event.at_s) - event.at_s
                self.changes.append(Change(nodes, event.kind == "remove", planned_s, within[-1] - before_s - due_s))


def measured(model: Model, seeds: int, apart_s: float) -> Measured:
    seen = Measured()
    for seed in range(seeds):
        # Each death at another moment of a step, and then two come back.
        lots = [(7 * i + seed) % NODES for i in range(NODES // 2)]
        kinds: list[Literal["add", "remove"]] = ["remove"] * len(lots) + ["add"] * 2
        churn = [
            Churn((i + 1) * apart_s + 0.7 * seed + 0.3 * i, kind, device)
            for i, (kind, device) in enumerate(zip(kinds, (*lots, *lots[:2]), strict=True))
        ]
        end_s = churn[-1].at_s + apart_s
        result = played(model, seed=seed, seconds=end_s, churn=churn)
        complain(result)
        seen.read(result, churn, end_s)
    return seen


def show_failures(names: Sequence[str], seeds: int, apart_s: float, trace: tuple[Churn, ...], seconds: float) -> None:
    for name in names:
        model, began_s = MODELS[name], time.process_time()
        seen = measured(model, seeds, apart_s)
        print(f"GPT-{name}: {num_parameters(spec_of(model).model) / 1e6:.0f} M parameters, {seeds} runs")
        print("  samples/s by nodes           ", {n: round(seen.rate(n), 1) for n in sorted(seen.rates, reverse=True)})
        for what, died in (("death", True), ("coming", False)):
            changes = [change for change in seen.changes if change.died == died]
            print(f"  seconds lost at a {what:11}", spread([change.lost_s for change in changes]))
            print("  seconds until its plan       ", spread([change.planned_s for change in changes]))
        for minutes, published in ((5, model.published[0]), (40, model.published[1])):
            period_s = 60.0 * minutes
            churn = [Churn(period_s * (i + 1), "remove", (7 * i) % NODES) for i in range(NODES // 2)]
            compare(f"every {minutes} min", model, seen, churn, 6 * period_s, published)
        if trace:
            compare("the trace", model, seen, trace, seconds, model.published[2])
        print(f"  {time.process_time() - began_s:.0f} s of CPU", flush=True)


def spread(values: Sequence[float]) -> str:
    return f"median {statistics.median(values):.1f}, {min(values):.1f} to {max(values):.1f}"


def complain(result: SimResult) -> None:
    for failure in result.failures[:3]:
        print(f"  FAILED: {failure}")
    if result.duplicates or result.given_up:
        print(f"  {result.duplicates} microbatches counted twice, {result.given_up} given up")


# --- the baseline ---


def baseline(
    model: Model, rate: Callable[[int], float], churn: Sequence[Churn], seconds: float, *, restart_s: float
) -> Account:
    """DeepSpeed as in section 6.1, at our own undisturbed speed. Checkpoints every 50 steps, or 200 where deaths are
    rare."""
    parameters = num_parameters(spec_of(model).model)
    expert = 3.0 * model.dim * (8 * model.dim // 3) * LAYERS
    held = parameters - expert * (model.experts - model.experts / model.group_size)
    system = Checkpointing(
        samples_per_s=rate,
        samples_per_device=SAMPLES_PER_DEVICE,
        interval_steps=200 if seconds > 7200.0 else 50,
        save_s=parameters * STATE_BYTES_PER_PARAMETER / STORAGE_BYTES_PER_S,
        load_s=held * STATE_BYTES_PER_PARAMETER / STORAGE_BYTES_PER_S,
        detect_s=DETECT_S,
        restart_s=restart_s,
        group_size=model.group_size,
    )
    return checkpointed(system, churn, num_devices=NODES, seconds=seconds)


def compare(title: str, model: Model, seen: Measured, churn: Sequence[Churn], seconds: float, published: str) -> None:
    """Ours: what the nodes that are there would do undisturbed, less what each change costs."""
    there = nodes_over_time(churn, seconds)
    undisturbed = sum(seen.rate(nodes) * (until - since) for since, until, nodes in there)
    lost = 0.0
    for event in churn:
        nodes = next((nodes for since, until, nodes in there if since <= event.at_s < until), 0)
        if nodes:  # else it is before the beginning, or nobody is left to lose anything
            lost += seen.rate(nodes) * seen.lost_s(died=event.kind == "remove", nodes=nodes)
    ours = undisturbed - lost
    print(f"  {title}: {ours:.0f} samples, {ours / undisturbed:.1%} of undisturbed")
    for kind, restart_s in RESTARTS_S.items():
        account = baseline(model, seen.rate, churn, seconds, restart_s=restart_s)
        print(
            f"    checkpointing, restart {restart_s:.0f} s ({kind}): {account.samples:.0f}"
            f" (computing {account.computing_s / seconds:.0%}, saving {account.saving_s / seconds:.0%},"
            f" restarting {account.restarting_s / seconds:.0%}); ours {ours / account.samples:.1f} times"
            + (f", published {published} ({float(published) / LAZARUS_COMPUTES:.1f} by churn)" if published else "")
        )


# --- a trace ---


def nodes_over_time(churn: Sequence[Churn], seconds: float) -> list[tuple[float, float, int]]:
    """[(since, until, how many)], without those times at which nobody is there."""
    first: dict[int, Churn] = {}
    for event in churn:
        first.setdefault(event.device, event)
    alive = {d for d in range(NODES) if d not in first or first[d].kind == "remove" or first[d].at_s <= 0.0}
    spans, since = [], 0.0
    for event in (*(e for e in churn if 0.0 < e.at_s < seconds), Churn(seconds, "remove", -1)):
        spans.append((since, event.at_s, len(alive)))
        since = event.at_s
        (alive.add if event.kind == "add" else alive.discard)(event.device)
    return [span for span in spans if span[1] > span[0] and span[2]]


# --- a hot expert ---


def show_hot(steps: int) -> None:
    """Four of Mixtral 8x7B's layers with six experts, on six peers: every token goes to one of them, and to another."""
    peers, experts = 6, 6
    base: dict[str, dict[str, Any]] = {
        "model": {
            "vocab_size": 32_000,
            "dim": 4096,
            "num_layers": 4,
            "num_heads": 32,
            "num_kv_heads": 8,
            "ffn_dim": 14_336,
            "context": 4096,
            "num_experts": experts,
            "experts_per_token": 2,
        },
        "optimizer": {"warmup_steps": 0},
        "training": {"microbatches_per_step": 48, "microbatch_size": 1, "s_max": 0},
        "wire": {"gradients": "bf16"},
    }
    rates = {}
    for slots in (1, 3):
        swarm = {
            "stages": 1,
            "min_peers": peers,
            "expert_slots": slots,
            "expert_replicas": min(2, slots),
            "term_s": 600.0,
        }
        training = base["training"] | {"steps": steps if slots > 1 else 12}  # with one replica each nothing can move
        result = run_modelled(
            ModelledRun(
                topology=machines(peers, 50e12),
                spec=msgspec.convert(base | {"swarm": swarm, "training": training}, RunSpec),
                stages=Placement(stages=(tuple(range(peers)),), bounds=(0, 4)),
                expert_loads=[experts - 1.0] + [1.0] * (experts - 1),
                chunk_bytes=32 << 20,
            )
        )
        complain(result)
        took = np.diff([step.committed_at_s for step in result.steps])
        first, last = (result.tokens_per_step / float(np.median(part)) for part in (took[3:25], took[-8:]))
        rates[slots] = last
        plans = [event.text for event in result.events if event.change == "plan"]
        print(
            f"{slots} slots: {first:.0f} tokens/s in the first steps, {last:.0f} in the last; plans: {plans}",
            flush=True,
        )
    print(f"adaptive over one replica each: {rates[3] / rates[1]:.2f} times (wanted: 2)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("hot", "failures"), nargs="?", default="hot")
    parser.add_argument("--models", default="S,M,L")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--apart", type=float, default=60.0, help="seconds between two changes")
    parser.add_argument("--trace", type=Path, help="CSV of deploy/simulate/traces.py, for the survivors' figures")
    parser.add_argument("--start", type=float, default=19_200.0, help="second of the trace to begin at")
    parser.add_argument("--seconds", type=float, default=4800.0, help="of the trace")
    parser.add_argument("--steps", type=int, default=65, help="with a hot expert")
    options = parser.parse_args()
    logging.getLogger("shoal").setLevel(logging.ERROR)  # that the dead cannot be reached is known
    if options.what == "hot":
        show_hot(options.steps)
        return
    trace: tuple[Churn, ...] = ()
    if options.trace is not None:
        recorded = load_trace(options.trace)
        trace = replay(recorded, num_devices=NODES, seconds=options.seconds, start_s=options.start)
    show_failures(options.models.split(","), options.seeds, options.apart, trace, options.seconds)


if __name__ == "__main__":
    main()
