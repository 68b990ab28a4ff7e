"""The events of a simulated swarm, from its nodes to the invariants."""

import msgspec
from sim_faults import Fault

from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, RoundStart
from shoal.protocol.plan import SignedPlan


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float


class _OfNode(_Seen, frozen=True, kw_only=True):
    name: str
    life: int
    """The number of the process of that name, from 0; each restart counts one up."""


class Started(_OfNode, frozen=True, kw_only=True):
    peer: PeerID

    def __str__(self) -> str:
        return f"{self.name} starts (life {self.life}) as {self.peer[-8:]}"


class Obeyed(_OfNode, frozen=True, kw_only=True):
    """A node starts to obey this plan."""

    plan: SignedPlan

    def __str__(self) -> str:
        return f"{self.name} obeys plan {self.plan.plan.order}: {self.plan.plan.reason}"


class Held(_OfNode, frozen=True, kw_only=True):
    """A node has stepped to, or loaded, a state of its stage."""

    incarnation: int
    """The number of the node's replica. Each replica begins without state, as each process does."""
    era: int
    stage: int
    version: int
    digest: str
    is_finite: bool

    def __str__(self) -> str:
        return f"{self.name} holds version {self.version} of stage {self.stage} in era {self.era}: {self.digest[:8]}"


class CommitSeen(_OfNode, frozen=True, kw_only=True):
    """A node's group agrees on a commit. Every member reports each commit."""

    report: CommitReport

    def __str__(self) -> str:
        r = self.report
        return f"{self.name}: stage {r.stage} committed step {r.step} of era {r.era} with {r.members} members"


class Opened(_OfNode, frozen=True, kw_only=True):
    """A group leader has named the members of a round to another node."""

    start: RoundStart

    def __str__(self) -> str:
        start = self.start
        return f"{self.name} opens round {start.step} of stage {start.stage}, attempt {start.attempt}"


class FinishSeen(_OfNode, frozen=True, kw_only=True):
    """A node knows that the run is done, and has ended."""

    def __str__(self) -> str:
        return f"{self.name} has ended"


class Failed(_OfNode, frozen=True, kw_only=True):
    """A node cannot go on, or one of its handlers raised."""

    error: str

    def __str__(self) -> str:
        return f"{self.name} failed: {self.error}"


class Injected(_Seen, frozen=True, kw_only=True):
    """A fault begins."""

    fault: Fault

    def __str__(self) -> str:
        return f"fault: {self.fault}"


class Quiet(_Seen, frozen=True, kw_only=True):
    """All faults are over, and no more follow."""

    def __str__(self) -> str:
        return "all is healed"


class Ticked(_Seen, frozen=True, kw_only=True):
    """A tick; `running` are the nodes that are alive and have not ended."""

    running: tuple[str, ...]


Event = Started | Obeyed | Held | CommitSeen | Opened | FinishSeen | Failed | Injected | Quiet | Ticked
