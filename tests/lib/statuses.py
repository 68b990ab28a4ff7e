"""What a coordinator says of its swarm, and the view of it, for tests that care about a part of it."""

from typing import Any

from shoal.deploy.dashboard.feed import Feed, RunFacts
from shoal.deploy.dashboard.view import View
from shoal.deploy.record.report import Status
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import PeerStatus, SwarmStatus

_USUAL: dict[str, Any] = {
    "run": "r",
    "name": "n",
    "term": 1,
    "plan_sequence": 1,
    "plan_reason": "",
    "step": 1,
    "steps": 10,
    "tokens_per_s": 0.0,
    "loss": None,
    "validation_loss": None,
    "staleness_steps_mean": 0.0,
}


def swarm_status(**says: Any) -> SwarmStatus:
    """Needs `coordinator`, `stages` and `peers`."""
    return SwarmStatus(**(_USUAL | says))


def peer_status(peer: PeerID, **says: Any) -> PeerStatus:
    """Of a member that trains the first stage, unless told otherwise."""
    usual = {
        "name": "",
        "device": "cpu",
        "stage": 0,
        "version": 1,
        "synced": True,
        "draining": False,
        "seen_s_ago": 0.0,
        "forward_s": 0.0,
        "window": 1,
    }
    return PeerStatus(peer=peer, **(usual | says))


def view_of(status: SwarmStatus) -> View:
    """What somebody sees who has heard this status and nothing else."""
    feed = Feed(RunFacts.of_status(status), title="", wall_minus_clock_s=0.0)
    feed.take(Status(status=status), 0.0)
    return feed.view(0.0)
