"""Reacts when this peer's device has no memory for a job: frees caches, and claims less memory."""

import asyncio

from shoal.peer.handoff.initial import begun_numel
from shoal.peer.inference.service import InferenceService
from shoal.peer.presence.life import Life
from shoal.peer.presence.neighbours import Neighbours
from shoal.peer.presence.own_word import OwnWord
from shoal.peer.presence.parts import Part, Parts
from shoal.peer.presence.reports import Reports
from shoal.protocol.spec import RunSpec


class Shortages:
    """Reacts to shortages of one peer's memory. Args: spare: has caches that can be freed."""

    def __init__(
        self,
        spec: RunSpec,
        life: Life,
        parts: Parts,
        own: OwnWord,
        neighbours: Neighbours,
        reports: Reports,
        spare: InferenceService,
    ) -> None:
        self._spec, self._life, self._parts, self._own = spec, life, parts, own
        self._neighbours, self._reports, self._spare = neighbours, reports, spare
        self.num = 0
        """Number of shortages so far."""
        self._short: dict[Part, asyncio.TimerHandle] = {}
        """Membership that paused for lack of memory -> the timer of its next attempt to go on."""

    def free(self) -> None:
        """Free the caches that training does not need."""
        self._spare.free()

    def add(self, part: Part) -> None:
        """Claim less memory, so that the next plan gives us fewer layers: memory was short for the work of `part`, even
        with all caches freed. The part has paused and returned the microbatches that it can.

        The new claim is 3/4 of the old one, and at most 5/4 of the part's state and base. The new claim is too little
        for the same stage: plans count at least 16 bytes a parameter (the state's 12 included), and the base."""
        state_bytes = part.state_bytes
        if self._spec.adapter is not None and part is self._parts.stage:
            state_bytes += sum(4 * begun_numel(self._spec, key) for key in part.keys) // 2
        before = self._own.advert().memory_bytes
        after = self._own.claimed_bytes = min(3 * before // 4, 5 * state_bytes // 4)
        self.num += 1
        if part in self._short:
            return
        self._reports.say(
            f"out of memory: this peer's work goes to others, and it claims {after / 1e9:.2g} GB "
            f"instead of {before / 1e9:.2g} GB"
        )
        # By then the next plan has given the part's place to another peer, if one has room.
        self._short[part] = asyncio.get_running_loop().call_later(20.0, self._try_again, part)
        self._neighbours.announce()

    def close(self) -> None:
        for timer in self._short.values():
            timer.cancel()

    def _try_again(self, part: Part) -> None:
        """Resume the part: no plan has given the part's place to another peer, so perhaps no other peer has room."""
        del self._short[part]
        if part in self._parts.all and not self._life.is_paused:
            part.resume()
