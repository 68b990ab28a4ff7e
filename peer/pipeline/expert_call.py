"""Jobs of the device that call experts on other peers, and leave the device until the answer is here."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.protocol.ports import Payload

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCall:
    """A call to the experts of one layer, for the P rows of one microbatch, sorted by expert."""

    layer: int
    counts: tuple[int, ...]
    """Rows of each expert; their sum is P."""
    tokens: Payload
    """[P, D] in the wire dtype."""
    gradients: Payload | None = None
    """The gradient of the experts' output, [P, D] in the wire dtype; None: a forward."""

    @property
    def backward(self) -> bool:
        return self.gradients is not None


Calling = Generator[ExpertCall, Payload | None, T]
"""A job that does `output = yield ExpertCall(...)`, [P, D] in the wire dtype, for each call, and returns a `T`. It
holds no torch mode over a `yield`, because other jobs run meanwhile."""


class JobInParts(Generic[T]):
    """Runs a `Calling` part by part. After the last part `value` is the job's result."""

    value: T

    def __init__(self, job: Calling[T]) -> None:
        self._job = job

    def go_on(self, output: Payload | None = None) -> ExpertCall | None:
        """Run the next part, given the answer to the call before (None: the first part). Return its call; None:
        done."""
        try:
            return self._job.send(output)
        except StopIteration as ended:
            self.value = ended.value
            return None
