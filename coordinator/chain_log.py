"""The log of the last live plans with their votes, from which peers that were away catch up. Pure.

It is bounded in bytes: a peer that has been away for longer than the log reaches takes a plan on trust (`chain_sync`).
"""

from collections import deque

from shoal.protocol.limits import CONTROL_BYTES_MAX, LINKS_KEPT_BYTES, LINKS_PER_REPLY_MAX
from shoal.protocol.plan import SignedPlan

ENVELOPE_BYTES = 1024
"""The bytes that an envelope and a message's own fields take of a control message at most."""


class ChainLog:
    """The last links of the chain."""

    def __init__(self) -> None:
        self._links: deque[SignedPlan] = deque()
        """The plans, oldest first; the last is the live plan."""
        self._bytes = 0
        self.mandated: SignedPlan | None = None
        """The last plan that needed no votes because the owner mandated it. It is kept however old it is: a peer that
        has missed it believes nothing of its reign without it."""

    @property
    def before_last(self) -> SignedPlan | None:
        """The plan before the live one."""
        return self._links[-2] if len(self._links) > 1 else None

    def add(self, plan: SignedPlan) -> None:
        """Append the next live plan."""
        if self._links and plan.plan.previous != self._links[-1].digest:
            self._links.clear()  # whoever has the ones before could not go on from them
            self._bytes = 0
        self._links.append(plan)
        self._bytes += len(plan.link)
        while self._bytes > LINKS_KEPT_BYTES and len(self._links) > 2:
            self._bytes -= len(self._links.popleft().link)
        if plan.plan.mandate:
            self.mandated = plan

    def find(self, digest: str) -> SignedPlan | None:
        return next((plan for plan in self._links if plan.digest == digest), None)

    def after(self, digest: str, reign: int) -> tuple[bytes, ...]:
        """The links behind the plan of this digest, for a peer that knows of `reign`: oldest first, and as many as a
        message takes. If we do not have that plan they begin with the one before the last."""
        links = list(self._links)
        at = next((at for at, plan in enumerate(links) if plan.digest == digest), None)
        wanted = links[at + 1 :] if at is not None else links[-2:]
        if self.mandated is not None and self.mandated.plan.reign > reign and self.mandated not in wanted:
            wanted.insert(0, self.mandated)
        fitting: list[bytes] = []
        spare_bytes = CONTROL_BYTES_MAX - ENVELOPE_BYTES
        for plan in wanted[:LINKS_PER_REPLY_MAX]:
            spare_bytes -= len(plan.link) + 8
            if spare_bytes < 0:
                break
            fitting.append(plan.link)
        return tuple(fitting)
