"""The register of this peer's parts: its memberships in groups, by a replica of a stage or by experts that it holds."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from shoal.peer.group.witnesses import Witnessed, Witnesses
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import StageShard
from shoal.peer.replica.member import MemberCore
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import ExpertPlace, PresenceUpdate
from shoal.protocol.plan import Plan


class Part(Protocol):
    """One membership of the peer in a group; `GroupMembership` documents it."""

    group_id: int
    witnesses: Witnesses

    @property
    def core(self) -> MemberCore: ...

    @property
    def keys(self) -> tuple[str, ...]: ...

    @property
    def version(self) -> int: ...

    @property
    def state(self) -> StageState | None: ...

    @property
    def state_bytes(self) -> int: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_learner(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def is_stepping(self) -> bool: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def audience(self) -> list[PeerID]: ...

    def peer_state(self, peer: PeerID, presence: PresenceUpdate) -> None: ...

    def peer_died(self, peer: PeerID) -> None: ...

    def peer_reborn(self, peer: PeerID, incarnation: int) -> None: ...

    def peer_silent(self, peer: PeerID) -> None: ...

    def pause(self, *, at_once: bool) -> None: ...

    def resume(self) -> None: ...

    async def drain(self, timeout_s: float, *, unless: Callable[[], bool]) -> bool: ...

    def stay(self, plan: Plan) -> None: ...


class StagePart(Part, Protocol):
    """The peer's replica of a stage; `Replica` documents it."""

    stage: int
    layers: tuple[int, int]

    @property
    def runtime(self) -> StageShard: ...

    @property
    def is_idle(self) -> bool: ...

    def experts_at(self, peer: PeerID, presence: PresenceUpdate) -> None: ...


class ExpertHolding(Part, Protocol):
    """One expert that the peer holds; `ExpertMembership` documents it."""

    @property
    def place(self) -> ExpertPlace: ...

    def wants(self, microbatch: Microbatch) -> bool: ...

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, retried: bool) -> None: ...


class Parts:
    """One peer's parts, its memberships in groups. `StageSeat` and `ExpertSeats` begin, end and register them."""

    def __init__(self) -> None:
        self.stage: StagePart | None = None
        self.experts: Mapping[int, ExpertHolding] = {}
        """Number of an expert's group -> our membership in that group."""

    @property
    def all(self) -> list[Part]:
        """All memberships: the stage first, then the experts in the order of their groups."""
        experts = (part for _, part in sorted(self.experts.items()))
        return [self.stage, *experts] if self.stage is not None else [*experts]

    @property
    def places(self) -> tuple[ExpertPlace, ...]:
        """The experts that we hold, in the form of our presence updates."""
        return tuple(part.place for _, part in sorted(self.experts.items()))

    @property
    def audience(self) -> list[PeerID]:
        """The peers to tell about the readiness of any of our memberships."""
        return list(dict.fromkeys(peer for part in self.all for peer in part.audience))

    # --- the state that we train ---

    def state_of(self, keys: Collection[str]) -> StageState | None:
        """Return the trained state that includes these layers; None: this peer has none, or a step is under way."""
        states = (part.state for part in self.all if part.is_ready)
        return next((state for state in states if state is not None and set(keys) <= state.layers.keys()), None)

    def is_stepping(self, keys: Collection[str]) -> bool:
        """True while these layers have no state because they are in an optimizer step."""
        return any(part.is_stepping and set(keys) <= set(part.keys) for part in self.all)

    async def witnessed(self, source: PeerID, keys: Collection[str], version: int) -> Witnessed | None:
        """Return the state, with its holders' signatures, that `source` may fetch as a newcomer of a group with these
        layers; None: there is none for `source`. Args: version: -1: the newest. Raises: Refused: too few signatures."""
        for part in self.all:
            state = part.state
            if part.is_ready and state is not None and set(keys) <= state.layers.keys():
                return await part.witnesses.offer(source, state, version)
        return None

    # --- what our parts are told of other peers ---

    def heard(self, source: PeerID, presence: PresenceUpdate) -> None:
        for part in self.all:
            part.peer_state(source, presence)

    def reborn(self, peer: PeerID, incarnation: int) -> None:
        for part in self.all:
            part.peer_reborn(peer, incarnation)

    def died(self, peer: PeerID) -> None:
        for part in self.all:
            part.peer_died(peer)

    def silent(self, peer: PeerID) -> None:
        for part in self.all:
            part.peer_silent(peer)
