"""Decides how many lanes a stream should have. Pure.

Some connections fill a way that loses nothing, begin faster than one, and let calls pass beside frames. Where packets
are lost each connection carries what it carries, whatever the line has, so there the lanes are doubled until there are
`LANES_MAX`.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shoal.protocol.limits import LANES_MAX

LANES_FIRST: Final = 4
_LOSS_MIN: Final = 0.003
"""The part of packets sent again from which on lanes are added: at 0.3 % and 60 ms one connection carries 4 Mbit/s."""
_PACKETS_MIN: Final = 300
"""Fewer packets than this say nothing: at 0.3 % one of them is lost."""
_FIELDS: Final = struct.Struct("=100xI52xI")
"""Packets sent again, and all that had data: of `tcp_info`, whose layout is the kernel's promise to its users."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Packets with data that some connections have sent."""

    packets: int = 0
    again: int = 0
    """How many of them had been sent before."""

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.packets + other.packets, self.again + other.again)

    def __sub__(self, other: "Sent") -> "Sent":
        return Sent(self.packets - other.packets, self.again - other.again)


def sent_of(infos: Iterable[bytes]) -> Sent:
    """What `tcp_info` says of some connections together; nothing of those of which it says nothing."""
    total = Sent()
    for info in infos:
        if len(info) >= _FIELDS.size:
            again, packets = _FIELDS.unpack_from(info)
            total += Sent(packets, again)
    return total


class LaneCount:
    """How many lanes one stream should have."""

    def __init__(self) -> None:
        self.wanted = LANES_FIRST
        self._judged = Sent()

    def look(self, sent: Sent) -> None:
        """Args: sent: by the lanes that there are, since they are open."""
        new = sent - self._judged
        if new.packets < 0 or new.again < 0:  # some have ended
            self._judged = sent
        elif new.packets >= _PACKETS_MIN:
            self._judged = sent
            if new.again >= _LOSS_MIN * new.packets:
                self.wanted = min(LANES_MAX, 2 * self.wanted)
