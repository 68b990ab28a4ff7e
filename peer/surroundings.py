"""What a replica needs of its peer: the ports, the run, and whom to tell what."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.peer.arithmetic import Arithmetic
from shoal.peer.base_layers import BaseLayers
from shoal.peer.carried import CarriedState
from shoal.peer.experts.server import ExpertServer
from shoal.peer.fetching_ahead import FetchingAhead
from shoal.peer.handoff.inbox import ChunkInbox
from shoal.peer.handoff.server import StateServer
from shoal.peer.kept_layers import KeptLayers
from shoal.peer.pipeline.state import StageState
from shoal.peer.recent_plans import RecentPlans
from shoal.peer.replica.flow import Traffic
from shoal.peer.replica.member import MemberCore
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, ValidationReport
from shoal.protocol.ports import Clock, Compute
from shoal.protocol.spec import RunSpec


class Part(Protocol):
    """One of the peer's parts in groups; `Tenure` documents it."""

    group_id: int

    @property
    def core(self) -> MemberCore: ...

    @property
    def state_bytes(self) -> int: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Whom in the peer its parts tell what."""

    on_commit: Callable[[CommitReport], None]
    """To be reported."""
    on_witness: Callable[[CommitReport], None]
    """Reported by a mate."""
    on_validation: Callable[[ValidationReport], None]
    on_state: Callable[[Part, StageState], None]
    """Stepped or loaded; for snapshots."""
    on_change: Callable[[], None]
    """Ready or open changed: tell the neighbours."""
    on_resync: Callable[[Part], None]
    """Our state is not our mates'."""
    on_unreachable: Callable[[PeerID], None]
    """A call or a frame to it has failed."""
    on_unsound: Callable[[PeerID], None]
    """It has sent numbers into a round that no gradient has, or begins anew without end."""
    begin_era: Callable[[int, int], bool]
    """Whether we may begin it from its beginning, in a group."""
    on_failure: Callable[[BaseException], None]
    on_no_memory: Callable[[], None]
    """A job has found no memory: what the peer keeps for others and can do without is to go."""
    on_shortage: Callable[[Part], None]
    """There is no memory for what it was given. It has paused itself, and has handed back what it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenLayouts:
    """What a peer has of one layout when another begins."""

    carried: CarriedState
    ahead: FetchingAhead
    base: BaseLayers | None
    """What adapters stand beside, the same in all layouts; None: all weights train."""
    kept: KeptLayers
    """What a light member that ends has of its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """One for all tenures of a peer."""

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
