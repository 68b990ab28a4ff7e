"""What a GroupCore asks its driver to do."""

from dataclasses import dataclass

from shoal.protocol.identity import PeerID
from shoal.protocol.messages import CommitReport, Digest, Progress, RoundStart


@dataclass(frozen=True, slots=True)
class Tell:
    """Send `message` to every mate, or only `to` one; if it `can_wait`, to the lead at once and to the others before
    long; if it `can_rest` too, to the lead before long as well."""

    message: Progress | RoundStart | Digest
    can_wait: bool = False
    can_rest: bool = False
    to: PeerID | None = None


@dataclass(frozen=True, slots=True)
class Reduce:
    """Take part in this round; an older attempt of the same step is void."""

    round: RoundStart


@dataclass(frozen=True, slots=True)
class Report:
    """The group has committed and agrees. Only the lead reports."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class Witness:
    """The group has committed and agrees, and another member reports it. For whoever watches over our shoulder."""

    report: CommitReport


@dataclass(frozen=True, slots=True)
class CatchUp:
    """`mate` is at a later version and its round was not ours: fetch the reduced gradient of `step` from it."""

    mate: PeerID
    step: int


@dataclass(frozen=True, slots=True)
class AskRepair:
    """Contributions to `step` were lost with a replica: stage 0 must run these microbatches again."""

    step: int
    indices: bytes


@dataclass(frozen=True, slots=True)
class Resync:
    """Our state at `version` is not the group's: fetch it from `mate`."""

    mate: PeerID
    version: int


Command = Tell | Reduce | Report | Witness | CatchUp | Resync | AskRepair
