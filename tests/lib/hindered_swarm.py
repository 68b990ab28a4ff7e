"""Modelled swarms whose devices and links become slower during a run, and whose pairs lose each other.

A device slows down because it is hot, or its owner plays a game; a link because others use it. Two peers behind routers
may never connect, and a connected pair loses its path when a router forgets it.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from shoal.deploy.simulate.modelled_swarm import ModelledSwarm, check_devices
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.network import LinkSpec
from shoal.protocol.sim.paths import Cut
from shoal.protocol.topology import Topology


class Slowing(NamedTuple):
    """A device, or each link between it and `others`, is `times` slower from `at_s` on than at the beginning.

    The last slowing of a device or link counts; a factor of 1 ends it.
    """

    at_s: float
    device: int
    times: float
    others: tuple[int, ...] = ()
    """The other ends of the links; empty: the device itself computes more slowly."""

    def links(self) -> Iterable[tuple[int, int]]:
        """Yield (from, to) of each link, both ways."""
        for other in self.others:
            yield self.device, other
            yield other, self.device


class Severing(NamedTuple):
    """Nothing passes between `one` and `other`, in either direction, from `at_s` until `until_s`."""

    at_s: float
    one: int
    other: int
    until_s: float = math.inf


def hindered(*hindrances: Slowing | Severing) -> Callable[..., ModelledSwarm]:
    """What `ModelledRun.make_swarm` takes. Hindrances of devices that join later are ignored."""
    return partial(_HinderedSwarm, hindrances=hindrances)


class _HinderedSwarm(ModelledSwarm):
    """Raises: LocalError: as `check_slowings` and `check_severings`."""

    def __init__(self, *args: Any, hindrances: Sequence[Slowing | Severing], **options: Any) -> None:
        super().__init__(*args, **options)
        slowings = [each for each in hindrances if isinstance(each, Slowing)]
        severings = [each for each in hindrances if isinstance(each, Severing)]
        check_slowings(self._topology, slowings)
        check_severings(self._topology, severings)
        self._severed: dict[frozenset[int], Cut] = {}
        loop = asyncio.get_running_loop()
        for slowing in slowings:
            loop.call_at(slowing.at_s, self._slow, slowing)
        for severing in severings:
            loop.call_at(severing.at_s, self._sever, severing.one, severing.other)
            if severing.until_s < math.inf:
                loop.call_at(severing.until_s, self._join, severing.one, severing.other)

    def _slow(self, slowing: Slowing) -> None:
        t, peer = self._topology, self._peers.get(slowing.device)
        if peer is not None and not slowing.others:
            self._world.slow_device(peer, slowing.times)
        for source, destination in slowing.links():
            if source in self._peers and destination in self._peers:
                link = LinkSpec(
                    latency_s=float(t.latency_s[source, destination]),
                    rate_bytes_per_s=link_bytes_per_s(t, source, destination) / slowing.times,
                )
                self._world.set_link(self._peers[source], self._peers[destination], link)

    def _sever(self, one: int, other: int) -> None:
        pair = frozenset((one, other))
        if pair not in self._severed and len(pair.intersection(self._peers)) == 2:
            self._severed[pair] = self._world.partition([self._peers[one]], [self._peers[other]])

    def _join(self, one: int, other: int) -> None:
        cut = self._severed.pop(frozenset((one, other)), None)
        if cut is not None:
            self._world.heal(cut)


def link_bytes_per_s(topology: Topology, source: int, destination: int) -> float:
    """The rate of an idle link: that of the path, or of the slower card at its ends."""
    path = float(topology.bytes_per_s[source, destination])
    return min(path, float(topology.up_bytes_per_s[source]), float(topology.down_bytes_per_s[destination]))


def check_slowings(topology: Topology, slowings: Sequence[Slowing]) -> None:
    """Raises: LocalError: an unknown device, a link of a device to itself, or an impossible factor."""
    for slowing in slowings:
        check_devices(topology, {slowing.device, *slowing.others}, "a slowing")
        if slowing.device in slowing.others:
            raise LocalError(f"device {slowing.device} has no link to itself that could slow down")
        if not 0.0 < slowing.times < math.inf:
            raise LocalError(f"a device or link cannot be {slowing.times} times slower")


def check_severings(topology: Topology, severings: Sequence[Severing]) -> None:
    """Raises: LocalError: one names an unknown device, one device twice, or ends before it begins."""
    for severing in severings:
        check_devices(topology, {severing.one, severing.other}, "a severing")
        if severing.one == severing.other:
            raise LocalError(f"device {severing.one} cannot lose itself")
        if not severing.at_s < severing.until_s:
            raise LocalError(f"a severing lasts from {severing.at_s} to {severing.until_s} s")


def after(topology: Topology, slowings: Iterable[Slowing]) -> Topology:
    """The network after all slowings. Raises: LocalError: as `check_slowings`."""
    flop_per_s, bytes_per_s = topology.flop_per_s.copy(), topology.bytes_per_s.copy()
    ordered = sorted(slowings, key=lambda slowing: slowing.at_s)
    check_slowings(topology, ordered)
    for slowing in ordered:
        if not slowing.others:
            flop_per_s[slowing.device] = topology.flop_per_s[slowing.device] / slowing.times
        for source, destination in slowing.links():
            bytes_per_s[source, destination] = link_bytes_per_s(topology, source, destination) / slowing.times
    return replace(topology, flop_per_s=flop_per_s, bytes_per_s=bytes_per_s)
