"""Decides which newcomers may join: invites limit them, and an open run admits a few at a time. Pure."""

import ipaddress
import re
from collections.abc import Callable, Mapping

from shoal.protocol.identity import PeerID
from shoal.protocol.limits import OPEN_NEWCOMERS_MIN, OPEN_PER_NETWORK_MAX, OPEN_PROBATION_S
from shoal.protocol.membership import Members
from shoal.protocol.messages import Advert

_IP = re.compile(r"^/ip[46]/([^/]+)/")


class Admission:
    """Admits newcomers. Args: is_open: the run's spec lets any peer join."""

    def __init__(self, members: Members, now_s: Callable[[], float], *, is_open: bool) -> None:
        self._members, self._now_s, self._is_open = members, now_s, is_open
        self._let_in_s: dict[PeerID, float] = {}
        """Newcomer on probation in an open run -> the time at which it was let in."""

    def why_not(self, newcomer: PeerID, advert: Advert, present: Mapping[PeerID, Advert | None]) -> str:
        """Admit `newcomer`. Returns: the reason if it may not join; empty: it is admitted, or has a place already."""
        if newcomer in present:
            return ""
        if not self._is_open or newcomer == self._members.owner:
            return self._members.why_not_enter(newcomer, present)
        now_s = self._now_s()
        self._let_in_s = {
            peer: since_s
            for peer, since_s in self._let_in_s.items()
            if now_s - since_s < OPEN_PROBATION_S and peer in present
        }
        if len(self._let_in_s) >= max(OPEN_NEWCOMERS_MIN, len(present) // 2):
            return f"{len(self._let_in_s)} others have just joined this open run: it admits you in a minute"
        network = network_of(advert)
        beside = sum(1 for other in present.values() if other is not None and network_of(other) == network)
        if beside >= OPEN_PER_NETWORK_MAX:
            return f"{beside} peers of your network are in this open run already, which is the limit"
        self._let_in_s[newcomer] = now_s
        return ""


def network_of(advert: Advert) -> str:
    """The /24 (IPv6: /48) of the peer's first public address; empty: it has none, for instance behind a NAT."""
    for address in advert.addresses:
        match = _IP.match(address)
        if match is None:
            continue
        try:
            ip = ipaddress.ip_address(match[1])
        except ValueError:
            continue
        if ip.is_global:
            return str(ipaddress.ip_network(f"{ip}/{24 if ip.version == 4 else 48}", strict=False))
    return ""
