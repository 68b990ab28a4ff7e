"""What a coordinator says of its swarm, for tests that care about a part of it."""

from typing import Any

from shoal.protocol.messages import SwarmStatus

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
