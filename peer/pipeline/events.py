"""What a `PipelineCore` is told and what it asks for: its events and its commands."""

from dataclasses import dataclass
from typing import Literal

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.identity import PeerID

# --- events ---


@dataclass(frozen=True, slots=True)
class Arrived:
    """An activation came in from `source`, or (stage 0, source None) the lead granted us the microbatch."""

    microbatch: Microbatch
    source: PeerID | None
    again: bool = False
    """It may have run before, here or elsewhere."""


@dataclass(frozen=True, slots=True)
class GradientArrived:
    """The next stage is done with it. For validation: the loss is known."""

    microbatch: Microbatch
    source: PeerID
    waited_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class JobDone:
    job: "Job"


@dataclass(frozen=True, slots=True)
class JobParked:
    """It waits for other peers, and leaves the device to whatever else there is meanwhile. What it still needs of the
    device it gets beside the jobs of the core's choice; in the end there is a `JobDone` all the same."""

    job: "Job"


@dataclass(frozen=True, slots=True)
class JobDropped:
    """A parked one does not go on, since its microbatch has been handed back: nothing comes of it."""

    job: "Job"


@dataclass(frozen=True, slots=True)
class StepReady:
    """The group has the whole reduced gradient of `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class VersionSet:
    """State was loaded at `version`, by no step of ours."""

    version: int


@dataclass(frozen=True, slots=True)
class PeerReady:
    """`peer`, of the next stage, takes traffic."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class PeerLost:
    """`peer` died, left the plan, or no longer takes traffic and will not answer what it owes."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class HandedBack:
    """`peer`, of the next stage, will not make it: it pauses."""

    microbatch: Microbatch
    peer: PeerID


@dataclass(frozen=True, slots=True)
class Paused:
    """We pause: no forward begins any more, and what has none yet goes back to whoever sent it. Backwards go on as
    gradients come, unless `at_once`: then everything goes back but the job that runs."""

    at_once: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """As before the pause."""


Event = (
    Arrived
    | GradientArrived
    | JobDone
    | JobParked
    | JobDropped
    | StepReady
    | VersionSet
    | PeerReady
    | PeerLost
    | HandedBack
    | Paused
    | Resumed
)

# --- commands ---

JobKind = Literal["forward", "backward", "loss", "validate", "step"]


@dataclass(frozen=True, slots=True)
class Job:
    """One run of the device. `microbatch` is None for a step; `version` is the one it runs at."""

    kind: JobKind
    microbatch: Microbatch | None
    version: int

    def __str__(self) -> str:
        letter = {"forward": "F", "backward": "B", "loss": "L", "validate": "V", "step": "S"}[self.kind]
        return f"{letter}{self.microbatch or self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEntry:
    """One job, or a part of one: `F(3, 1)` is the forward of microbatch (3, 1). Seconds of this peer's clock."""

    job: Job
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class SendActivation:
    microbatch: Microbatch
    target: PeerID
    again: bool = False


@dataclass(frozen=True, slots=True)
class SendGradient:
    """`waited_s`: how long the microbatch stood in queues here and in all later stages, forth and back. `commit_s`: how
    long commits take, in that of these stages where they take longest."""

    microbatch: Microbatch
    target: PeerID
    waited_s: float = 0.0
    commit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Contributed:
    """Backward is done, its gradient is here."""

    microbatch: Microbatch
    staleness_steps: int
    again: bool = False
    """A mate may have it, too."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Stage 0: the microbatch is through the whole pipeline."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class Forget:
    """Free what is kept for it: nobody will ask any more."""

    microbatch: Microbatch


@dataclass(frozen=True, slots=True)
class HandBack:
    """It will not be made here: whoever sent it sends it elsewhere. At stage 0 (target None) the lead sees to it."""

    microbatch: Microbatch
    target: PeerID | None
    begun: bool
    """It may have run, here or elsewhere."""


Command = Job | SendActivation | SendGradient | Contributed | Finished | Forget | HandBack
