"""Which way a replica's microbatches go, and how many of them are under way: the parts that a comparison exchanges."""

from typing import Protocol

from shoal.peer.pipeline.router import Router
from shoal.peer.pipeline.window import Window


class Traffic(Protocol):
    """Asked once by every replica that a peer holds."""

    def router(self) -> Router: ...

    def window(self, num_stages: int) -> Window:
        """At stage 0."""
        ...


class AdaptiveTraffic:
    """By the plan's shares, and as many as the pipeline is measured to need."""

    def router(self) -> Router:
        return Router()

    def window(self, num_stages: int) -> Window:
        return Window(num_stages=num_stages)
