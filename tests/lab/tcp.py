"""What one TCP connection carries over a way that loses packets. Pure.

Each loss halves what is on the way, and each round trip without one adds a packet. The mean is

    rate = packet / round trip * sqrt(3 / 2) / sqrt(loss)

Source: Mathis, Semke, Mahdavi, Ott: "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", CCR 27(3),
1997, equation 3, for random losses and an acknowledgement of each packet. Cubic is no quicker where the round trips of
homes meet losses of a percent: there it does as Reno would (RFC 9438, section 4.3).
"""

import math

PACKET_BYTES = 1_448
"""The payload of a packet of 1,500 bytes, with TCP's timestamps."""


def tcp_bytes_per_s(round_trip_s: float, loss: float) -> float:
    """Args: loss: of a packet, from one end to the other, in [0, 1). Returns: bytes/s, inf without loss."""
    if loss <= 0.0 or round_trip_s <= 0.0:
        return math.inf
    return PACKET_BYTES / round_trip_s * math.sqrt(1.5 / loss)


def either_loses(loss: float, other: float) -> float:
    """The part of packets that is lost on two lines together."""
    return 1.0 - (1.0 - loss) * (1.0 - other)
