"""The draws of a campaign's seed: the network, the machines, the run and the faults."""

import random
import typing
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from sim_faults import FaultKind, Schedule, draw_schedule
from tiny_run import tiny_spec

from shoal.peer.replica.flow import Traffic
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.network import LinkSpec
from shoal.protocol.spec import RunSpec, WireSpec
from shoal.protocol.wire_format import WireFormat

STEP_S = 2.0
"""The approximate time of a step without faults: longer than a round trip, so that faults hit all its parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignOptions:
    """Options that all seeds of a campaign share."""

    peers: int = 9
    stages: int = 3
    steps: int = 45
    experts: int = 0
    """The experts of a layer, placed among the members of its stage; 0: a dense model."""
    fault_s: float = 60.0
    """The seconds after the first commit in which faults happen."""
    mean_gap_s: float = 8.0
    """The mean time between the starts of two faults."""
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    wire: WireSpec | None = None
    """The wire formats; None: fp32, so that a synchronous swarm trains as one process does."""

    def __post_init__(self) -> None:
        if self.peers < 2 * self.stages:
            raise LocalError(f"{self.peers} peers are too few: a campaign needs two for each of {self.stages} stages")
        if self.steps * STEP_S < self.fault_s:
            raise LocalError(f"{self.steps} steps are over before {self.fault_s:g} s of faults are")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One swarm and its faults."""

    seed: int
    spec: RunSpec
    link: LinkSpec
    """Between any two peers."""
    device_flop_per_s: float
    speeds: dict[str, float]
    """Peer name -> factor on its speed."""
    schedule: Schedule
    traffic: Traffic | None = None
    """The traffic of `PeerDriver`; None: its own."""


def draw_trial(seed: int, options: CampaignOptions) -> Trial:
    rng = random.Random(f"shoal campaign/{seed}")
    names = [f"n{number}" for number in range(options.peers)]
    latency_s = rng.choice((0.005, 0.02, 0.05, 0.1))
    spec = tiny_spec(
        steps=options.steps,
        peers=options.peers,
        stages=options.stages,
        s_max=rng.choice((0, 0, 1)),
        experts=options.experts,
        term_s=rng.choice((5.0, 15.0, 60.0)),
    )
    if options.wire is not None:
        spec = msgspec.structs.replace(spec, wire=options.wire)
    schedule = draw_schedule(rng, names, duration_s=options.fault_s, mean_gap_s=options.mean_gap_s, kinds=options.kinds)
    return Trial(
        seed=seed,
        spec=spec,
        link=LinkSpec(
            latency_s=latency_s,
            rate_bytes_per_s=rng.choice((1e6, 1e7)),
            jitter_s=latency_s * rng.choice((0.0, 0.2, 1.0)),
        ),
        device_flop_per_s=8e6,
        speeds={name: rng.choice((0.5, 1.0, 1.0, 1.0, 2.0)) for name in names},
        schedule=schedule,
    )


def parse_wire(text: str | None) -> WireSpec | None:
    """Read `FORTH,BACK,SUMS`: formats of activations, of their gradients, and of reductions. Raises: LocalError."""
    if text is None:
        return None
    names = text.split(",")
    try:
        forth, back, sums = names
        return msgspec.convert({"activations": forth, "activation_gradients": back, "gradients": sums}, WireSpec)
    except ValueError as error:  # ValidationError is a ValueError
        known = ", ".join(typing.get_args(WireFormat))
        raise LocalError(
            f"{text!r} does not name three formats, as int8,int8,hadamard4 does: take some of {known}"
        ) from error


def parse_kinds(names: Sequence[str]) -> tuple[FaultKind, ...]:
    """Return the kinds of faults by name; all kinds if there are no `names`. Raises: LocalError: an unknown name."""
    for name in names:
        if name not in set(FaultKind):
            raise LocalError(f"{name!r} is not a fault: take some of {', '.join(FaultKind)}")
    return tuple(FaultKind(name) for name in names) or tuple(FaultKind)
