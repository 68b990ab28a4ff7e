"""A job that needs something of other peers halfway, and leaves the device until it is there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.protocol.ports import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """What the experts of one layer are asked, for the P rows of one microbatch, sorted by expert."""

    layer: int
    """The decoder layer."""
    counts: tuple[int, ...]
    """Rows of each expert; P together."""
    tokens: Payload
    """[P, D] in the wire dtype."""
    gradients: Payload | None = None
    """Of what came out of the tokens, [P, D] in the wire dtype; None: a forward."""

    @property
    def backward(self) -> bool:
        return self.gradients is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspended:
    """In place of a job's value: `resume` with what the experts answer, [P, D] in the wire dtype, is the job's next
    part, and returns its value, or another of these."""

    call: ExpertCall
    resume: Callable[[Payload], Any]
    flop: float
    """Of the next part."""
