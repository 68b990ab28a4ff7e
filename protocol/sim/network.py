"""A simulated network: one `LinkSpec` per directed pair of places, one `CardSpec` per peer.

A place is a position in the network, given by its number; a world assigns the first free place to each new peer.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoal.protocol.errors import LocalError
from shoal.protocol.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """The path from one peer to another."""

    latency_s: float
    """Seconds from the moment when a byte is sent to its arrival, one way."""
    rate_bytes_per_s: float = math.inf
    """The rate of the path alone; the network cards of both peers limit traffic further."""
    jitter_s: float = 0.0
    """Longest extra delay of a message, in seconds; delays are uniform from 0. Frames of a stream keep their order."""
    loss: float = 0.0
    """Probability per message. A lost frame is late by a round trip or more (TCP retransmits); a lost call is gone."""
    spikes: float = 0.0
    """Probability per message of a delay spike: a delayed call can be overtaken; a delayed frame blocks its stream."""
    spike_s: float = 1.0
    """Longest delay by a spike, in seconds; spikes last uniformly from 0 to this."""
    corruption: float = 0.0
    """Probability per message of flipped bits. A damaged frame breaks its stream; a damaged request reaches its
    handler, but its caller gets Unreachable, as for a damaged reply."""
    duplication: float = 0.0
    """Probability per message of a second delivery, as when a sender resends on a new stream; TCP never repeats."""
    repeat_s: float = 1.0
    """Longest time from the first to the second delivery, in seconds; times are uniform from 0 to this."""

    def __post_init__(self) -> None:
        # Each condition is written so that NaN fails it.
        if not 0.0 <= self.latency_s < math.inf:
            raise LocalError(f"a link's latency must be 0 s or more, not {self.latency_s}")
        if not self.rate_bytes_per_s > 0.0:
            raise LocalError(f"a link's rate must be above 0 bytes/s, not {self.rate_bytes_per_s}")
        if not 0.0 <= self.jitter_s < math.inf:
            raise LocalError(f"a link's jitter must be 0 s or more, not {self.jitter_s}")
        if not 0.0 <= self.loss < 1.0:
            raise LocalError(f"a link's loss must be a probability below 1, not {self.loss}")
        for name in ("spikes", "corruption", "duplication"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise LocalError(f"a link's {name} must be a probability, not {getattr(self, name)}")
        for name in ("spike_s", "repeat_s"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise LocalError(f"a link's {name} must be 0 s or more, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSpec:
    """A peer's network card: one rate for all traffic out, one for all traffic in."""

    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (self.up_bytes_per_s > 0.0 and self.down_bytes_per_s > 0.0):
            raise LocalError(
                f"a card's rates must be above 0 bytes/s, not {self.up_bytes_per_s} up, {self.down_bytes_per_s} down"
            )


class Network:
    """A network without a limit on places, with the same link between any two places."""

    def __init__(self, spec: LinkSpec) -> None:
        self._spec = spec
        self.num_places = math.inf
        self.typical_latency_s = spec.latency_s

    def link(self, source: int, destination: int) -> LinkSpec:
        return self._spec


def uniform(
    latency_s: float, rate_bytes_per_s: float = math.inf, *, jitter_s: float = 0.0, loss: float = 0.0
) -> Network:
    return Network(LinkSpec(latency_s=latency_s, rate_bytes_per_s=rate_bytes_per_s, jitter_s=jitter_s, loss=loss))


_NO_PATH = LinkSpec(latency_s=1.0, rate_bytes_per_s=1e-3)
"""A path so slow that calls time out and frames do not leave before the end of any run."""


class MatrixNetwork(Network):
    """A network given by matrices of latency and rate; device i of the topology is at place i. The rates of network
    cards are arguments of `World.add_peer`."""

    def __init__(self, topology: Topology) -> None:
        self._latency_s = topology.latency_s
        self._bytes_per_s = topology.bytes_per_s
        self.num_places = topology.num_devices
        others_s = np.sort(self._latency_s[~np.eye(topology.num_devices, dtype=bool)])
        self.typical_latency_s = float(others_s[(len(others_s) - 1) // 2]) if len(others_s) else 0.0
        self._known: dict[tuple[int, int], LinkSpec] = {}
        self._of_kind: dict[tuple[float, float], LinkSpec] = {}
        """(latency, rate) -> the spec that all pairs with these values share: a thousand peers have a million pairs,
        but few kinds of links."""

    def link(self, source: int, destination: int) -> LinkSpec:
        known = self._known.get((source, destination))
        if known is not None:
            return known
        kind = (float(self._latency_s[source, destination]), float(self._bytes_per_s[source, destination]))
        link = self._of_kind.get(kind)
        if link is None:
            latency_s, rate = kind
            link = LinkSpec(latency_s=latency_s, rate_bytes_per_s=rate) if rate > 0.0 else _NO_PATH
            self._of_kind[kind] = link
        self._known[source, destination] = link
        return link
