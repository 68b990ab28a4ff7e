"""Holds what a page, a scrape of `/metrics` or a terminal may show of a run at one moment, as plain values.

Strings that came from other peers have been made printable and cut to length (`feed.py`); who shows them still has to
escape them for where they go.
"""

from typing import Literal

import msgspec

from shoal.deploy.report import LimitsNow
from shoal.deploy.words import duration, printable
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

SILENT_S = 3.0
"""How long a peer has not been heard when a view says so."""

PeerState = Literal["training", "light", "fetching", "paused", "draining", "silent", "spare", "unheard"]


def peer_state(peer: PeerStatus) -> PeerState:
    """What the peer is doing, in one word. Of several things it is the worst."""
    if peer.seen_s_ago > SILENT_S:
        return "silent"
    if peer.paused_s is not None:
        return "paused"  # after a while it also drains, which says less
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
STANDS = "waiting, and it is not known for what"
STALE_S = 15.0
"""A view says that the coordinator has not answered for so long, in place of figures that may be wrong."""


def run_phase(status: SwarmStatus) -> str:
    """What the run as a whole does, or waits for; that is in the coordinator's words."""
    if status.step >= status.steps:
        return DONE
    if status.waits_for:
        return f"waiting for {printable(status.waits_for)}"
    if status.stands_s:
        return STANDS
    return TRAINING if status.step > 0 or status.loss is not None else FIRST_STEP


def standstill(status: SwarmStatus) -> str:
    """The time for which no step has come, in words; empty: the run goes on."""
    return f"no step for {duration(status.stands_s)}" if status.stands_s and status.step < status.steps else ""


def unanswered(age_s: float | None) -> str:
    """What is said in place of figures that are old; empty while `age_s`, the age of the status, is not long."""
    return "" if age_s is None or age_s <= STALE_S else f"the coordinator has not answered for {duration(age_s)}"


class _Shown(msgspec.Struct, frozen=True, kw_only=True):
    pass


class PeerView(_Shown, frozen=True):
    """One line of the coordinator's table."""

    id: PeerID
    name: str
    device: str
    stage: int | None
    state: PeerState
    version: int
    """The version that the peer holds; -1: it has not been heard yet."""
    seen_s_ago: float
    paused_s: float | None
    """How long the peer's owner has had the device back."""
    forward_s: float
    """The median time of a microbatch's forward (last stage: and backward); 0: there was none yet."""
    window: int
    share: float
    """The peer's share of its stage's traffic, in [0, 1]."""
    flop_per_s: float
    """The speed by the peer's probe; 0: it was not told."""
    is_coordinator: bool
    is_me: bool
    is_new: bool
    """Whether the peer joined a short while ago."""
    shortages: int = 0
    """How often it had no memory for what a plan had given it."""
    light: tuple[int, int] | None = None
    """(Layers whose state is there, layers of its stage) of who trains with weights while its state comes."""


class GoneView(_Shown, frozen=True):
    """A peer that was here a short while ago."""

    id: PeerID
    name: str
    stage: int | None
    ago_s: float


class LinkView(_Shown, frozen=True, array_like=True):
    """Traffic from one peer to another, bytes/s."""

    source: PeerID
    target: PeerID
    bytes_per_s: float
    measured: bool
    """Whether one of the link's ends measured it; else it follows from the plan's shares at the present pace."""


class ExpertView(_Shown, frozen=True):
    """One expert of a stage with mixture-of-experts layers."""

    stage: int
    expert: int
    load: float | None
    """The load relative to an even spread: 1 is average. None: it is not known yet."""
    replicas: int
    """How many peers hold the expert."""
    holders: tuple[int, ...] = ()
    """The holders as positions in `View.peers`."""
    coming: tuple[int, ...] = ()
    """The peers that are to hold the expert and are fetching it."""


class ChangeView(_Shown, frozen=True):
    """A line of the run's history."""

    at_s: float
    """Seconds since 1970, on this machine's clock."""
    kind: Literal["plan", "joined", "left", "note"]
    text: str
    sequence: int = 0
    """The number of a plan; with `term` it gives the order of plans."""
    term: int = 0
    coordinator: str = ""
    outcome: str = ""
    """How fast a plan's layout was to be and how fast it was, once the plan has a successor."""


class LimitedBy(_Shown, frozen=True):
    """The cause that keeps a peer from giving more."""

    kind: Literal["pause", "cap", "device", "upload", "state", "place", "swarm", "nothing", "unknown"]
    text: str


class MineView(_Shown, frozen=True):
    """What one peer gives, by its own measurements; rates are over the last ten seconds."""

    peer: PeerID
    name: str
    limited_by: LimitedBy
    limits: LimitsNow | None
    busy: float
    """Share of the time in which the device computed, in [0, 1]."""
    sending: float
    """Share of the time in which something was on its way out, in [0, 1]."""
    flop_per_s: float
    tokens_per_s: float
    """Tokens/s that went through this peer's layers, over the last minute."""
    work_share: float
    """The peer's share of the whole run's work, in [0, 1]: its tokens times its share of the layers."""
    sent_bytes_per_s: float
    received_bytes_per_s: float
    flop_total: float
    microbatches_total: int
    tokens_total: int
    sent_bytes_total: float
    received_bytes_total: float
    memory_bytes: int
    uptime_s: float


class View(_Shown, frozen=True):
    """Everything but the curves."""

    title: str
    run: str
    name: str
    phase: str
    """What the run is doing, in words."""
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
    """The version that was validated."""
    tokens_per_s: float | None
    """The rate of the run over the last minute, standstills included; None: the coordinator has long not answered."""
    foreseen: str
    """How fast the live layout should be, how fast it is, and what bounds it, in a sentence; empty: nobody knows."""
    formats: str
    """How tensors travel under the live plan, in words; empty: nobody knows, or the run leaves its plans no choice."""
    foreseen_tokens_per_s: float | None
    seen_tokens_per_s: float | None
    """The layout's usual rate of late, standstills left out; None: it has made too few steps."""
    staleness_steps_mean: float
    now_s: float
    """Seconds since 1970, on this machine's clock."""
    elapsed_s: float
    """Seconds since the run's first plan."""
    left_s: float | None
    """Seconds until the last step, at that rate; None: it is not known, or nothing moves."""
    standstill: str
    """The time for which no step has come, in words; empty: the run goes on."""
    risks: tuple[str, ...]
    """What would be lost with one peer, in sentences."""
    status_age_s: float | None
    """Seconds since the coordinator was last heard of; None: it never was."""
    coordinator: PeerID
    coordinator_name: str
    stages: tuple[tuple[int, int], ...]
    """The range of layers of each stage."""
    peers: tuple[PeerView, ...]
    """The peers in stage order, spares last."""
    gone: tuple[GoneView, ...]
    links: tuple[LinkView, ...]
    flows: tuple[float, ...]
    """Bytes/s from each stage to the next, activations there and gradients back."""
    experts: tuple[ExpertView, ...]
    mine: MineView | None
    others: tuple[MineView, ...]
    """The same of other peers that told us: in a demo all of them."""
    changes: tuple[ChangeView, ...]
    """The changes, newest first."""


class Point(_Shown, frozen=True, array_like=True):
    """One point of the curves."""

    at_s: float
    """Seconds since 1970, on this machine's clock."""
    step: int
    """Steps done."""
    loss: float | None
    tokens_per_s: float | None
    staleness_steps_mean: float
    learning_rate: float | None = None
    gradient_norm: float | None = None
    """The norm of the whole model's gradient before clipping; None: it is not known."""


class ValidationPoint(_Shown, frozen=True, array_like=True):
    """One validation, where it belongs on the curves."""

    at_s: float
    """When the version was made, or as near to it as is known; seconds since 1970."""
    step: int
    """The version that was validated."""
    loss: float
