"""Defines the plain values that describe a run at one moment, for the page, `/metrics` and terminals.

Strings from other peers are printable and cut to length (`feed.py`); a display still has to escape them for its format.
"""

from typing import Literal

import msgspec

from shoal.deploy.base.words import duration, printable
from shoal.deploy.record.report import Given
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

PeerState = Literal["training", "light", "fetching", "paused", "draining", "silent", "spare", "unheard"]


def peer_state(peer: PeerStatus) -> PeerState:
    """Return a peer's state; if several states apply, the worst."""
    if peer.seen_s_ago > 3.0:
        return "silent"
    if peer.paused_s is not None:
        return "paused"  # a long pause also drains, which says less
    if peer.draining:
        return "draining"
    if peer.stage is None:
        return "spare"
    if peer.version < 0:
        return "unheard"
    if peer.synced:
        return "training"
    return "fetching" if peer.light is None else "light"


TRAINING = "training"
DONE = "the run is done"
FIRST_STEP = "computing the first step"
STANDS = "waiting for an unknown reason"
STALE_S = 15.0
"""The coordinator's silence after which a view says so, instead of showing figures that may be wrong."""


def run_phase(status: SwarmStatus) -> str:
    """Return the run's activity or, in the coordinator's words, what the run waits for."""
    if status.step >= status.steps:
        return DONE
    if status.waits_for:
        return f"waiting for {printable(status.waits_for)}"
    if status.stands_s:
        return STANDS
    return TRAINING if status.step > 0 or status.loss is not None else FIRST_STEP


def standstill(status: SwarmStatus) -> str:
    """Return the time without a step, in words; empty if the run goes on."""
    return f"no step for {duration(status.stands_s)}" if status.stands_s and status.step < status.steps else ""


def unanswered(age_s: float | None) -> str:
    """Return a sentence to show instead of outdated figures; empty if the age of the status is short or unknown."""
    return "" if age_s is None or age_s <= STALE_S else f"the coordinator has not answered for {duration(age_s)}"


class PeerView(msgspec.Struct, frozen=True):
    """One row of the coordinator's table."""

    id: PeerID
    name: str
    device: str
    stage: int | None
    state: PeerState
    version: int
    """The peer's version; -1: unknown yet."""
    seen_s_ago: float
    paused_s: float | None
    """How long the peer has been paused; None: it is not."""
    forward_s: float
    """The median time of a microbatch's forward (last stage: and backward); 0: unknown yet."""
    window: int
    share: float
    """The peer's share of its stage's traffic, in [0, 1]."""
    flop_per_s: float
    """The speed measured by the peer's probe; 0: unknown."""
    is_coordinator: bool
    is_me: bool
    is_new: bool
    shortages: int = 0
    """How often the peer's memory was too small for its plan."""
    light: tuple[int, int] | None = None
    """(layers with state, layers of its stage) of a learner, which trains with weights while its state downloads."""


class GoneView(msgspec.Struct, frozen=True):
    """A peer that left recently."""

    id: PeerID
    name: str
    stage: int | None
    ago_s: float


class LinkView(msgspec.Struct, frozen=True, array_like=True):
    """Traffic between two peers, both directions added, in bytes/s."""

    source: PeerID
    target: PeerID
    bytes_per_s: float
    measured: bool
    """True if an end of the link measured it; else it is estimated from the plan's shares."""


class ExpertView(msgspec.Struct, frozen=True):
    """One expert of a stage with mixture-of-experts layers."""

    stage: int
    expert: int
    load: float | None
    """The load relative to an even spread: 1 is average. None: unknown yet."""
    replicas: int
    holders: tuple[int, ...] = ()
    """Holders, as indexes into `View.peers`."""
    coming: tuple[int, ...] = ()
    """Future holders that are fetching the expert."""


class ChangeView(msgspec.Struct, frozen=True):
    """One line of the run's history."""

    at_s: float
    """Seconds since 1970, on this machine's clock."""
    kind: Literal["plan", "joined", "left", "note"]
    text: str
    sequence: int = 0
    """The number of a plan; plans are ordered by (term, sequence)."""
    term: int = 0
    coordinator: str = ""
    outcome: str = ""
    """The predicted and the actual speed of a plan's layout, once the plan has a successor."""


class LimitedBy(msgspec.Struct, frozen=True):
    """The cause that limits a peer's contribution."""

    kind: Literal["pause", "cap", "device", "upload", "state", "place", "swarm", "nothing", "unknown"]
    text: str


class MineView(Given, frozen=True, kw_only=True):
    """One peer's contribution, as a part of the run's work."""

    limited_by: LimitedBy
    tokens_per_s: float
    """Tokens/s through this peer's layers, over the last minute."""
    work_share: float
    """The peer's share of the run's work, in [0, 1]: tokens times its share of the layers."""
    sent_bytes_per_s: float
    received_bytes_per_s: float
    tokens_total: int


class View(msgspec.Struct, frozen=True):
    """The whole run at one moment, except the curves."""

    title: str
    run: str
    name: str
    phase: str
    term: int
    sequence: int
    reason: str
    era: int
    rollbacks: int
    step: int
    steps: int
    loss: float | None
    validation_loss: float | None
    validation_step: int | None
    tokens_per_s: float | None
    """The run's rate over the last minute, standstills included; None: the coordinator has not answered for long."""
    foreseen: str
    """The layout's predicted speed, its actual speed and its bottleneck, in a sentence; empty: unknown."""
    formats: str
    """The live plan's wire formats, in words; empty: unknown, or the run leaves no choice."""
    foreseen_tokens_per_s: float | None
    seen_tokens_per_s: float | None
    """The layout's median recent rate without standstills; None: too few steps."""
    staleness_steps_mean: float
    now_s: float
    """Seconds since 1970, on this machine's clock."""
    elapsed_s: float
    """Seconds since the run's first plan."""
    left_s: float | None
    """Seconds until the last step, estimated; None: unknown, or the run stands still."""
    standstill: str
    """The time without a step, in words; empty: the run goes on."""
    risks: tuple[str, ...]
    """Sentences about state that a single peer's loss would destroy."""
    status_age_s: float | None
    """Seconds since the coordinator's last message; None: there was none."""
    coordinator: PeerID
    coordinator_name: str
    stages: tuple[tuple[int, int], ...]
    peers: tuple[PeerView, ...]
    """Peers in stage order, standbys last."""
    gone: tuple[GoneView, ...]
    links: tuple[LinkView, ...]
    flows: tuple[float, ...]
    """Bytes/s from each stage to the next, activations there and gradients back."""
    experts: tuple[ExpertView, ...]
    mine: MineView | None
    others: tuple[MineView, ...]
    """Contributions of other peers that reported here: in a demo, all."""
    changes: tuple[ChangeView, ...]


class ValidationPoint(msgspec.Struct, frozen=True, array_like=True):
    """One validation on the curves."""

    at_s: float
    """When the version was made, approximately; seconds since 1970."""
    step: int
    loss: float
