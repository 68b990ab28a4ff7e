"""Draws what happens to a scenario's hosts, by a seed: an hour of it is a run as volunteers give it. Pure."""

import random
from collections.abc import Callable
from typing import Final

import msgspec

from scenario import Event, Host, Scenario

QUIET_S: Final = 60.0
"""Nothing happens in the first and the last minute."""
_BETWEEN_S: Final = (20.0, 60.0)
_AT_ONCE_MAX: Final = 2
"""Hosts that suffer something at the same time."""

Ailment = Callable[[random.Random, Host], tuple[str, float, str]]
"""(rng, host) -> (what happens, after how many seconds it ends, what ends it; empty: it ends by itself)."""


def _slow(rng: random.Random, host: Host) -> tuple[str, float, str]:
    return (
        f"set up_mbps {host.up_mbps * rng.uniform(0.15, 0.7):.1f}",
        rng.uniform(30, 120),
        f"set up_mbps {host.up_mbps:g}",
    )


def _lossy(rng: random.Random, host: Host) -> tuple[str, float, str]:
    return f"set loss {rng.uniform(0.002, 0.01):.4f}", rng.uniform(30, 120), f"set loss {host.loss:g}"


def _cut(rng: random.Random, host: Host) -> tuple[str, float, str]:
    return "cut", rng.uniform(2, 40), "heal"


def _suspended(rng: random.Random, host: Host) -> tuple[str, float, str]:
    return "suspend", rng.uniform(5, 60), "resume"


def _moved(rng: random.Random, host: Host) -> tuple[str, float, str]:
    return "address", 20.0, ""


def _killed(rng: random.Random, host: Host) -> tuple[str, float, str]:
    return "kill", rng.uniform(2, 60), "start"


def _left(rng: random.Random, host: Host) -> tuple[str, float, str]:
    return "leave", rng.uniform(60, 120), "start"


AILMENTS: Final[tuple[Ailment, ...]] = (_slow, _lossy, _cut, _suspended, _moved, _killed, _left)


def with_random_events(scenario: Scenario, *, seed: int, seconds: float) -> Scenario:
    """The same hosts for `seconds`, of whom one suffers something every 20 to 60 s, two at most at the same time."""
    rng, events = random.Random(seed), list[Event]()
    suffers_until_s: dict[str, float] = {}
    at_s = QUIET_S
    while at_s < seconds - 2 * QUIET_S:
        well = [host for host in scenario.hosts if suffers_until_s.get(host.name, 0.0) < at_s]
        if len(scenario.hosts) - len(well) < _AT_ONCE_MAX:
            host = rng.choice(well)
            do, lasts_s, undo = rng.choice(AILMENTS)(rng, host)
            until_s = min(at_s + lasts_s, seconds - QUIET_S)
            events.append(Event(at_s=round(at_s, 1), host=host.name, do=do))
            if undo:
                events.append(Event(at_s=round(until_s, 1), host=host.name, do=undo))
            suffers_until_s[host.name] = until_s + 10.0
        at_s += rng.uniform(*_BETWEEN_S)
    events.sort(key=lambda event: event.at_s)
    title = f"{scenario.file.title}, with random events of seed {seed}"
    file = msgspec.structs.replace(scenario.file, title=title, seconds=seconds, events=tuple(events))
    return msgspec.structs.replace(scenario, file=file)
