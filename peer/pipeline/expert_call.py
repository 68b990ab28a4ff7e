"""Jobs that call experts on other peers, and leave the device to other jobs until the answer arrives."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.protocol.ports import Payload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """A call to the experts of one layer, with the P rows (tokens) of one microbatch, sorted by expert."""

    layer: int
    counts: tuple[int, ...]
    """Rows of each expert; their sum is P."""
    tokens: Payload
    """The rows to compute, [P, D] in the wire dtype."""
    gradients: Payload | None = None
    """The gradient of the experts' output, [P, D] in the wire dtype; None: a forward."""

    @property
    def backward(self) -> bool:
        return self.gradients is not None


Calling = Generator[ExpertCall, Payload | None, T]
"""A job as a generator: `output = yield ExpertCall(...)` for each call, where the output is [P, D] in the wire dtype.
It returns a `T`. No torch mode (such as `no_grad`) may be active at a `yield`, because other jobs run meanwhile."""


class JobInParts(Generic[T]):
    """Runs a `Calling` (generator of calls to experts) part by part. At the end `value` is the job's result."""

    value: T

    def __init__(self, job: Calling[T]) -> None:
        self._job = job

    def go_on(self, output: Payload | None = None) -> ExpertCall | None:
        """Run the next part of the job. Args: output: the answer to the previous part's call; None: the first part.
        Returns: this part's call; None: the job is done."""
        try:
            return self._job.send(output)
        except StopIteration as ended:
            self.value = ended.value
            return None
