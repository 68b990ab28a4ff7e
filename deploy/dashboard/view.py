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
    """Return a peer's state; if several states apply, the most serious one."""
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
"""Seconds of silence of the coordinator after which a view reports the silence instead of outdated figures."""


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
    """Return a sentence that the coordinator is silent; empty if its last status is recent or of unknown age."""
    return "" if age_s is None or age_s <= STALE_S else f"the coordinator has not answered for {duration(age_s)}"


class PeerView(msgspec.Struct, frozen=True):
    """One row of the coordinator's table."""

    id: PeerID
    name: str
    device: str
    stage: int | None
    state: PeerState
    version: int
    """The model version of the peer's weights, in optimizer steps; -1: unknown yet."""
    seen_s_ago: float
    paused_s: float | None
    """How long the peer has been paused; None: it is not."""
    forward_s: float
    """Median seconds of a microbatch's forward on this peer; on the last stage, with the backward; 0: unknown yet."""
    window: int
    share: float
    """The part of its stage's work that the plan gives to this peer, in [0, 1]; 0: the peer is a spare."""
    flop_per_s: float
    """The speed that the peer measured on its own device; 0: unknown."""
    is_coordinator: bool
    is_me: bool
    is_new: bool
    shortages: int = 0
    """How often the peer's memory was too small for its plan."""
    light: tuple[int, int] | None = None
    """(layers with state, all layers of its stage) of a peer that trains while optimizer state arrives; else None."""
    fetch: str = ""
    """A sentence about the download that is under way: what, the bytes and seconds left, the senders; empty: none."""


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
    """True if one of the two peers measured the traffic; false: it is estimated from the plan's shares."""


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
    """Future holders, which are still fetching the expert, as indexes into `View.peers`."""


class ChangeView(msgspec.Struct, frozen=True):
    """One line of the run's history: a plan, an arrival, a departure or a note."""

    at_s: float
    """Seconds since 1970, on this machine's clock."""
    kind: Literal["plan", "joined", "left", "note"]
    text: str
    sequence: int = 0
    """The number of a plan; plans are ordered by (term, sequence)."""
    term: int = 0
    coordinator: str = ""
    outcome: str = ""
    """The predicted and the actual speed under a plan, in words; empty until the next plan is in force."""


class LimitedBy(msgspec.Struct, frozen=True):
    """The cause that limits a peer's contribution."""

    kind: Literal["pause", "cap", "device", "upload", "state", "place", "swarm", "nothing", "unknown"]
    text: str


class MineView(Given, frozen=True, kw_only=True):
    """The contribution of one peer, measured by itself, and its share of the run's work."""

    limited_by: LimitedBy
    tokens_per_s: float
    """Tokens/s through this peer's layers, over the last minute."""
    work_share: float
    """The peer's share of the run's work, in [0, 1]: its share of the tokens times its share of the layers."""
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
    """The run's rate over the last minute, standstills included; None: unknown, or the coordinator is silent."""
    foreseen: str
    """A sentence on the present layout: its predicted speed, actual speed and bottleneck; empty: unknown."""
    formats: str
    """The wire formats of the plan in force, in words; empty: unknown, or the run allows only one choice."""
    foreseen_tokens_per_s: float | None
    seen_tokens_per_s: float | None
    """The median tokens/s of recent steps under the present layout, standstills left out; None: too few steps."""
    staleness_steps_mean: float
    now_s: float
    """Seconds since 1970, on this machine's clock."""
    elapsed_s: float
    """Seconds since the run's first plan."""
    left_s: float | None
    """Seconds until the last step, estimated; None: unknown, or the run stands still or is done."""
    standstill: str
    """The time without a step, in words; empty: the run goes on."""
    risks: tuple[str, ...]
    """Sentences about state that a single peer's loss would destroy."""
    status_age_s: float | None
    """Seconds since the coordinator's last status arrived; None: none has arrived."""
    coordinator: PeerID
    coordinator_name: str
    stages: tuple[tuple[int, int], ...]
    peers: tuple[PeerView, ...]
    """Peers in stage order, standbys last."""
    gone: tuple[GoneView, ...]
    links: tuple[LinkView, ...]
    flows: tuple[float, ...]
    """Bytes/s between each stage and the next: the activations sent forward plus the gradients sent back."""
    experts: tuple[ExpertView, ...]
    mine: MineView | None
    others: tuple[MineView, ...]
    """The contributions of other peers that report to this process: all peers of a demo; elsewhere there are none."""
    changes: tuple[ChangeView, ...]


class ValidationPoint(msgspec.Struct, frozen=True, array_like=True):
    """One point of the curve of validation losses."""

    at_s: float
    """Approximate time at which training reached the version, in seconds since 1970."""
    step: int
    loss: float
