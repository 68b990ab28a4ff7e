"""A *passage*: one run of a microbatch through a stage with experts on other peers, and the holders that serve it."""

from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload


@dataclass(slots=True)
class ExpertPart:
    """The work of one expert, in all layers of the stage, for one run of a microbatch."""

    holder: PeerID | None = None
    """The present holder; None: not chosen yet, or lost."""
    avoid: PeerID | None = None
    """The previous holder, which failed."""
    replaced: bool = False
    """True if an earlier holder failed; that holder's sum may already contain this microbatch's gradient."""
    asked: dict[int, tuple[Payload, Payload]] = field(default_factory=dict)
    """Layer -> (tokens, gradients) sent for its backward, which a new holder would need; until the run's end."""
    done: set[int] = field(default_factory=set)
    """The layers in which the present holder has run the backward."""

    def lose(self) -> None:
        self.avoid, self.holder = self.holder, None
        self.done = set()
        self.replaced = True


@dataclass(slots=True, eq=False)
class Passage:
    """One run of a microbatch through the experts. Args: number: how many runs this peer began before in this stage."""

    number: int
    microbatch: Microbatch
    parts: dict[int, ExpertPart] = field(default_factory=dict)
    passed_by: set[tuple[int, int]] = field(default_factory=set)
    """Each (layer, expert) that no holder served in the forward, so that the backward leaves this expert out."""

    def part(self, expert: int) -> ExpertPart:
        return self.parts.setdefault(expert, ExpertPart())
