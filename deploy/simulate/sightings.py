"""Names what can be seen of a simulated swarm: the vocabulary between its nodes and the invariants."""

from dataclasses import dataclass

from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, RoundStart
from shoal.protocol.plan import SignedPlan
from shoal.protocol.sim.chaos import Fault


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfNode(_Seen):
    name: str
    life: int
    """The number of the process of that name, from 0: a crashed one comes back as another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_OfNode):
    peer: PeerID

    def __str__(self) -> str:
        return f"{self.name} starts (life {self.life}) as {self.peer[-8:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obeyed(_OfNode):
    """A node obeys this plan from now on."""

    plan: SignedPlan

    def __str__(self) -> str:
        return f"{self.name} obeys plan {self.plan.plan.order}: {self.plan.plan.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held(_OfNode):
    """A node has stepped to, or loaded, a state of its stage."""

    era: int
    stage: int
    version: int
    digest: str
    is_finite: bool

    def __str__(self) -> str:
        return f"{self.name} holds version {self.version} of stage {self.stage} in era {self.era}: {self.digest[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(_OfNode):
    """The group of a node agrees on a commit. Every member says so of each commit."""

    report: CommitReport

    def __str__(self) -> str:
        r = self.report
        return f"{self.name}: stage {r.stage} committed step {r.step} of era {r.era} with {r.members} members"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened(_OfNode):
    """A group leader has named the members of a round to another node."""

    start: RoundStart

    def __str__(self) -> str:
        start = self.start
        return f"{self.name} opens round {start.step} of stage {start.stage}, attempt {start.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(_OfNode):
    """A node has heard that the run is done, and has ended."""

    def __str__(self) -> str:
        return f"{self.name} has ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(_OfNode):
    """A node cannot go on, or one of its handlers raised."""

    error: str

    def __str__(self) -> str:
        return f"{self.name} failed: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected(_Seen):
    """A fault begins."""

    fault: Fault

    def __str__(self) -> str:
        return f"fault: {self.fault}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet(_Seen):
    """All faults are over, and nothing more goes wrong from now on."""

    def __str__(self) -> str:
        return "all is healed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked(_Seen):
    """A moment has passed; `running` are the nodes that are alive and have not ended."""

    running: tuple[str, ...]


Event = Started | Obeyed | Held | Committed | Opened | Finished | Failed | Injected | Quiet | Ticked
