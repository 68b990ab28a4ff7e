"""Keeps the last live plans with their votes, from which returning peers catch up. Pure.

A peer that was away for longer than the log reaches takes a plan on trust (`chain_sync`)."""

from collections import deque

from shoal.protocol.limits import CONTROL_BYTES_MAX, LINKS_KEPT_BYTES, LINKS_PER_REPLY_MAX
from shoal.protocol.plan import SignedPlan

ENVELOPE_BYTES = 1024
"""Upper bound of what an envelope and a message's own fields take in a control message."""


class ChainLog:
    """The last links of the chain, bounded in bytes."""

    def __init__(self) -> None:
        self._links: deque[SignedPlan] = deque()
        """Oldest first; the last is the live plan."""
        self._bytes = 0
        self.mandated: SignedPlan | None = None
        """The last plan that the owner mandated. It has no votes, so it is kept at any age."""

    @property
    def before_last(self) -> SignedPlan | None:
        """The predecessor of the live plan."""
        return self._links[-2] if len(self._links) > 1 else None

    def add(self, plan: SignedPlan) -> None:
        if self._links and plan.plan.previous != self._links[-1].digest:
            self._links.clear()  # a peer at an earlier plan could not continue across this gap
            self._bytes = 0
        self._links.append(plan)
        self._bytes += len(plan.link)
        while self._bytes > LINKS_KEPT_BYTES and len(self._links) > 2:
            self._bytes -= len(self._links.popleft().link)
        if plan.plan.mandate:
            self.mandated = plan

    def find(self, digest: str) -> SignedPlan | None:
        return next((plan for plan in self._links if plan.digest == digest), None)

    def after(self, digest: str, override_epoch: int) -> tuple[bytes, ...]:
        """Return the links after the plan with this digest, oldest first, as many as fit in a message. If we do not
        have that plan, start with the predecessor of the live plan. Prepend the mandated plan if the peer's
        `override_epoch` is lower."""
        links = list(self._links)
        at = next((at for at, plan in enumerate(links) if plan.digest == digest), None)
        wanted = links[at + 1 :] if at is not None else links[-2:]
        if (
            self.mandated is not None
            and self.mandated.plan.override_epoch > override_epoch
            and self.mandated not in wanted
        ):
            wanted.insert(0, self.mandated)
        fitting: list[bytes] = []
        spare_bytes = CONTROL_BYTES_MAX - ENVELOPE_BYTES
        for plan in wanted[:LINKS_PER_REPLY_MAX]:
            spare_bytes -= len(plan.link) + 8
            if spare_bytes < 0:
                break
            fitting.append(plan.link)
        return tuple(fitting)
