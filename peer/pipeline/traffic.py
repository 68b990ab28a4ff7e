"""Which way a replica's microbatches go, how many of them are under way, and how many run ahead of the version: the
parts that a comparison exchanges.
"""

from dataclasses import dataclass
from typing import Protocol

from shoal.peer.pipeline.control import Control
from shoal.peer.pipeline.router import Router
from shoal.peer.pipeline.window import Window
from shoal.protocol.spec import RunSpec
from shoal.protocol.staleness import price_of


class Traffic(Protocol):
    """Asked once by every replica that a peer holds."""

    def router(self) -> Router: ...

    def window(self, num_stages: int) -> Window:
        """At stage 0."""
        ...

    def control(self, spec: RunSpec) -> Control | None:
        """At stage 0. None: whatever s_max admits."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveTraffic:
    """By the plan's shares, and as many as the pipeline is measured to need.

    Args:
        controlled: nothing runs ahead that does not save time; False: whatever s_max admits does, for comparisons.
    """

    controlled: bool = True

    def router(self) -> Router:
        return Router()

    def window(self, num_stages: int) -> Window:
        return Window(num_stages=num_stages)

    def control(self, spec: RunSpec) -> Control | None:
        training = spec.training
        if not self.controlled or training.s_max == 0:
            return None
        price = price_of(training.compensation, optimizer=spec.optimizer.name)
        return Control(s_max=training.s_max, price=price, synchronous_steps=spec.synchronous_steps)
