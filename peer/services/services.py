"""The services that a replica gets from its peer: ports, the run, shared parts and callbacks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.peer.base.recent_plans import RecentPlans
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.disk.partial_checkpoint import PartialCheckpoint
from shoal.peer.handoff.base_layers import BaseLayers
from shoal.peer.handoff.fetching_ahead import FetchingAhead
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.retained_layers import RetainedLayers
from shoal.peer.handoff.server import StateServer
from shoal.peer.model.state import StageState
from shoal.peer.replica.flow import Traffic
from shoal.peer.replica.member import MemberCore
from shoal.peer.services.expert_server import ExpertServer
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, ValidationReport
from shoal.protocol.ports import Clock, Compute
from shoal.protocol.spec import RunSpec


class GroupPart(Protocol):
    """One of the peer's parts in groups; `GroupMembership` documents it."""

    group_id: int

    @property
    def core(self) -> MemberCore: ...

    @property
    def state_bytes(self) -> int: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Callbacks of a peer's parts to the peer."""

    on_commit: Callable[[CommitReport], None]
    on_witness: Callable[[CommitReport], None]
    """A commit that another member reports."""
    on_validation: Callable[[ValidationReport], None]
    on_state: Callable[[GroupPart, StageState], None]
    """The part has stepped or loaded a state; for snapshots."""
    on_change: Callable[[], None]
    """Readiness or openness has changed: tell the neighbours."""
    on_resync: Callable[[GroupPart], None]
    on_unreachable: Callable[[PeerID], None]
    on_unsound: Callable[[PeerID], None]
    """The peer has sent numbers into a round that no gradient has, or restarts without end."""
    begin_era: Callable[[int, int], bool]
    """(era, group) -> True if we may begin the era from its beginning."""
    on_failure: Callable[[BaseException], None]
    on_no_memory: Callable[[], None]
    """A job has found no memory: free what the peer keeps for others and can spare."""
    on_shortage: Callable[[GroupPart], None]
    """There is no memory for the part's work. It has paused and handed back what it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenLayouts:
    """State that a peer keeps from one layout to the next."""

    retained: RetainedLayers
    ahead: FetchingAhead
    base: BaseLayers | None
    """The frozen base of adapters, the same in all layouts; None: all weights train."""
    kept: PartialCheckpoint
    """The incomplete state of a light member that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that all tenures of a peer share."""

    endpoint: Endpoint
    compute: Compute
    clock: Clock
    spec: RunSpec
    arithmetic: Arithmetic
    traffic: Traffic
    listeners: Listeners
    inbox: ChunkInbox
    server: StateServer
    between: BetweenLayouts
    recent: RecentPlans
    experts: ExpertServer
