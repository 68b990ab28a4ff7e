"""Decide how many lanes a stream should have. Pure.

Without losses a few connections fill the path, start faster than one, and let calls pass beside frames. With losses
each connection has a fixed rate whatever the line's capacity, so the number of lanes is doubled up to `LANES_MAX`.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.protocol.limits import LANES_MAX

LANES_FIRST: Final = 4
_LOSS_MIN: Final = 0.003
"""Share of retransmitted packets from which lanes are added: at 0.3 % and 60 ms one connection carries 4 Mbit/s."""
_PACKETS_MIN: Final = 300
"""Fewer packets say nothing: at 0.3 % one of them is lost."""
_FIELDS: Final = struct.Struct("=100xI52xI")
"""Retransmitted packets, and all packets with data, in `tcp_info`. The kernel guarantees its layout."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Packets with data that some connections have sent."""

    packets: int = 0
    again: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.packets + other.packets, self.again + other.again)

    def __sub__(self, other: "Sent") -> "Sent":
        return Sent(self.packets - other.packets, self.again - other.again)


def sent_of(infos: Iterable[bytes]) -> Sent:
    """Return the sum over `tcp_info` of some connections; empty ones are skipped."""
    total = Sent()
    for info in infos:
        if len(info) >= _FIELDS.size:
            again, packets = _FIELDS.unpack_from(info)
            total += Sent(packets, again)
    return total


class LaneCount:
    """The number of lanes that one stream should have."""

    def __init__(self) -> None:
        self.wanted = LANES_FIRST
        self._judged = Sent()

    def look(self, sent: Sent) -> None:
        """Args: sent: by the existing lanes, since they were opened."""
        new = sent - self._judged
        if new.packets < 0 or new.again < 0:  # some have ended
            self._judged = sent
        elif new.packets >= _PACKETS_MIN:
            self._judged = sent
            if new.again >= _LOSS_MIN * new.packets:
                self.wanted = min(LANES_MAX, 2 * self.wanted)
