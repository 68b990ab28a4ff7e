"""Membership and gate of an open run, for tests of parts of a peer that have no plan."""

from shoal.protocol.access import Gate, Verdict
from shoal.protocol.identity import PeerID
from shoal.protocol.membership import Members


def everybody(run: str) -> Members:
    """Return the `Members` of an open run, which every peer may join."""
    return Members(run, PeerID(""), is_open=True)


class OpenGate(Gate):
    """Allows every message."""

    def __init__(self, members: Members | None = None) -> None:
        super().__init__(members or everybody(""), PeerID(""))

    def verdict(self, source: PeerID, kind: type) -> Verdict:
        return Verdict.ALLOWED
