"""A job of the device that asks experts on other peers halfway, and leaves the device until they have answered."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.protocol.ports import Payload

T = TypeVar("T")


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


Calling = Generator[ExpertCall, Payload | None, T]
"""A job that does `output = yield ExpertCall(...)`, [P, D] in the wire dtype, as often as it needs experts, and returns
a `T`. It holds no torch mode over a `yield`: other jobs run on the device's thread meanwhile."""


class JobInParts(Generic[T]):
    """Runs a `Calling` part by part. When no call is left, `value` is what the job returned."""

    value: T

    def __init__(self, job: Calling[T]) -> None:
        self._job = job

    def go_on(self, output: Payload | None = None) -> ExpertCall | None:
        """Run the next part. Returns: what it asks experts; None: the job is done.

        Args: output: what experts have made of the call before; None: this is the first part.
        """
        try:
            return self._job.send(output)
        except StopIteration as ended:
            self.value = ended.value
            return None
