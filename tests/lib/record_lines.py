"""Lines of a record, for tests that care about a part of them."""

from typing import Any

from shoal.deploy.record.lines import PlanLine, StepLine, ValidationLine
from shoal.protocol.identity import PeerID


def step(number: int, era: int = 0, **says: Any) -> StepLine:
    usual: dict[str, Any] = {
        "time": 1000.0 + number,
        "loss": 1.0,
        "learning_rate": 0.1,
        "tokens": 10,
        "staleness": 0.0,
        "peers": 2,
    }
    return StepLine(step=number, era=era, **(usual | says))


def validation(version: int, era: int = 0, **says: Any) -> ValidationLine:
    return ValidationLine(step=version, era=era, **({"time": 1000.0 + version, "loss": 2.0, "microbatches": 2} | says))


def plan(era: int = 0, restored: int = 0, **says: Any) -> PlanLine:
    usual: dict[str, Any] = {
        "time": 0.0,
        "term": 1,
        "sequence": 1,
        "coordinator": PeerID("a"),
        "reason": "first plan",
        "peers": 2,
        "stages": 1,
    }
    return PlanLine(era=era, restored=restored, **(usual | says))
