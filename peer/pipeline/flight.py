"""One microbatch that is at a replica: what its `Schedule` knows of it."""

from dataclasses import dataclass

from shoal.protocol.identity import PeerID


@dataclass(slots=True)
class Flight:
    """What is known of one microbatch that is here."""

    sources: set[PeerID]
    """Who waits for its gradient: none at stage 0, and more than one where somebody before us was doubted or died."""
    again: bool = False
    """It may have been before us elsewhere; what comes after us is told so too."""
    sent_before: bool = False
    staleness_steps: int = 0
    target: PeerID | None = None
    """Who owes us its gradient; None again once it is back."""
    doubted: PeerID | None = None
    """Who had it last when it was asked for once more: maybe it is only slow, so somebody else is tried."""
    handed_back: bool = False
    """While a job of it was parked, of which nothing comes any more."""
    loss: float = 0.0
    """Of a microbatch whose loss is known here: at the last stage, and on the way back of one that validates."""
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    sent_s: float = 0.0

    def waits_no_more(self, now_s: float) -> None:
        self.waited_s += now_s - self.waiting_since_s
