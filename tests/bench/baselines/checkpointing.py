"""What churn leaves of a system that saves to outside storage and begins again from there: the baseline for ours.

A synchronous run on interchangeable devices. It computes `interval_steps`, stands still while it saves, and so on. When
a device that it uses dies it loses what it has not saved and begins again with who is there; who comes waits until
enough have come. Only whole groups of `group_size` devices are of use: with expert parallelism a group has all experts,
so many a device as fit.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby

from shoal.deploy.simulate.modelled import Churn

_TINY_S = 1e-6
"""No time at all: sums of seconds are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """Times in seconds."""

    samples_per_s: Callable[[int], float]
    """Of so many devices, undisturbed."""
    samples_per_device: int
    """A step."""
    interval_steps: int
    """Between checkpoints."""
    save_s: float
    load_s: float
    """For each device that reads it: storage is shared."""
    detect_s: float
    """From a death to its being noticed."""
    restart_s: float
    """Processes, their groups and the model, without the checkpoint."""
    gather_s: float = 120.0
    """From somebody's coming to the restart that takes him in."""
    group_size: int = 1


@dataclass(slots=True, kw_only=True)
class Account:
    """Where the time went; the parts add up to the run's."""

    samples: float = 0.0
    """Trained and kept; at the end of the run also those that are not saved yet."""
    computing_s: float = 0.0
    """Of which part is lost."""
    saving_s: float = 0.0
    restarting_s: float = 0.0
    """With detecting and loading, and with waiting for enough devices."""
    lost_samples: float = 0.0
    restarts: int = 0


def checkpointed(system: Checkpointing, churn: Iterable[Churn], *, num_devices: int, seconds: float) -> Account:
    """Args: num_devices: there at the beginning, but for those that `churn` adds first, above 0 s."""
    events = sorted((event for event in churn if event.at_s < seconds), key=lambda event: event.at_s)
    first: dict[int, Churn] = {}
    for event in events:
        first.setdefault(event.device, event)
    alive = {device for device in range(num_devices) if device not in first or first[device].kind == "remove"}
    alive |= {event.device for event in events if event.kind == "add" and event.at_s <= 0.0}
    run = _Run(system, alive)
    for at_s, group in groupby(events, key=lambda event: event.at_s):
        run.go_on(at_s)
        for event in group:
            (run.alive.add if event.kind == "add" else run.alive.discard)(event.device)
        run.look(at_s)
    run.go_on(seconds)
    run.account.samples += run.unsaved
    return run.account


@dataclass(slots=True)
class _Run:
    system: Checkpointing
    alive: set[int]
    account: Account = field(default_factory=Account)
    unsaved: float = 0.0
    _now_s: float = 0.0
    _up_at_s: float = 0.0
    """It stands until then."""
    _into_s: float = 0.0
    """Computed since the last checkpoint; beyond that, saved for so long."""
    _join_at_s: float = math.inf
    """When it begins again with those who have come."""
    _used: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._used = self._usable()
        if not self._used:
            self._up_at_s = math.inf

    def look(self, now_s: float) -> None:
        """Somebody has come or gone."""
        if not self._used <= self.alive:
            self.account.lost_samples += self.unsaved
            self._begin(now_s, self.system.detect_s)
        elif not self._used:
            self._begin(now_s, 0.0)
        elif len(self._usable()) > len(self._used):
            self._join_at_s = min(self._join_at_s, now_s + self.system.gather_s)
        else:
            self._join_at_s = math.inf

    def go_on(self, until_s: float) -> None:
        while self._join_at_s <= until_s:
            at_s, self._join_at_s = self._join_at_s, math.inf
            self._advance(at_s)
            # What is not saved yet is saved first.
            self.account.samples += self.unsaved
            self._begin(at_s, self.system.save_s if self.unsaved else 0.0)
        self._advance(until_s)

    def _usable(self) -> set[int]:
        size = self.system.group_size
        return set(sorted(self.alive)[: len(self.alive) // size * size])

    def _begin(self, now_s: float, after_s: float) -> None:
        self._used, self.unsaved, self._into_s, self._join_at_s = self._usable(), 0.0, 0.0, math.inf
        self._up_at_s = math.inf
        if self._used:
            self.account.restarts += 1
            self._up_at_s = now_s + after_s + self.system.restart_s + self.system.load_s * len(self._used)

    def _advance(self, until_s: float) -> None:
        s, account = self.system, self.account
        if self._now_s < (up_s := min(self._up_at_s, until_s)):
            account.restarting_s += up_s - self._now_s
            self._now_s = up_s
        if self._now_s >= until_s:
            return
        rate = s.samples_per_s(len(self._used))
        compute_s = s.interval_steps * s.samples_per_device * len(self._used) / rate
        while until_s - self._now_s > _TINY_S:
            if compute_s - self._into_s > _TINY_S:
                for_s = min(compute_s - self._into_s, until_s - self._now_s)
                account.computing_s += for_s
                self.unsaved += rate * for_s
            else:
                for_s = min(max(0.0, compute_s + s.save_s - self._into_s), until_s - self._now_s)
                account.saving_s += for_s
            self._into_s += for_s
            self._now_s += for_s
            if compute_s + s.save_s - self._into_s <= _TINY_S:
                account.samples += self.unsaved
                self.unsaved, self._into_s = 0.0, 0.0
