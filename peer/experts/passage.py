"""One run of a microbatch through a stage whose experts are elsewhere: who has which expert of it, and what of it."""

from dataclasses import dataclass, field

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload


@dataclass(slots=True)
class Part:
    """One expert's, of all layers of the stage."""

    holder: PeerID | None = None
    """Who has it; None: nobody yet, or not any more."""
    avoid: PeerID | None = None
    """Who had it and could not."""
    replaced: bool = False
    """Somebody has had it before: it may come twice."""
    asked: dict[int, tuple[Payload, Payload]] = field(default_factory=dict)
    """Layer -> (tokens, gradients) of its backward: kept until it is settled, for whoever may have to do it again."""
    done: set[int] = field(default_factory=set)
    """Layers whose backward the holder has done."""

    def lose(self) -> None:
        self.avoid, self.holder = self.holder, None
        self.done = set()
        self.replaced = True


@dataclass(slots=True, eq=False)
class Passage:
    """Args: number: of the runs of this tenure."""

    number: int
    microbatch: Microbatch
    parts: dict[int, Part] = field(default_factory=dict)
    """By expert."""
    passed_by: set[tuple[int, int]] = field(default_factory=set)
    """(layer, expert) that nobody was there for in the forward: there is nothing to go back through."""

    def part(self, expert: int) -> Part:
        return self.parts.setdefault(expert, Part())
