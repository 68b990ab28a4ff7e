"""Decides when all stages write a snapshot of the same version, which together is a complete one. Pure.

Heartbeats report how long ago each stage last wrote a snapshot (`Heartbeat.unsaved_s`). If that is too long for any
peer, the coordinator's replies name a version that no stage has reached yet (`HeartbeatReply.save_at`). A stage that
learns of it too late still reports itself as unsaved, and the coordinator names another version. A young run saves
sooner: after `_FIRST_S`, and each time that its age has doubled."""

import math
from collections import deque
from collections.abc import Iterable

from shoal.protocol.messages import Heartbeat

_NOTICE_HEARTBEATS = 2.5
"""Notice for each version: each peer's next heartbeat learns of it, with room for a late one."""
_FIRST_S = 30.0
"""Seconds until the first snapshot. Before it, a layer with a single holder has no copy."""


class SnapshotSchedule:
    """Chooses the versions to save.

    Args:
        interval_s: time between two snapshots; 0: none by the clock.
        lead_steps: how many versions one stage may be ahead of another.
    """

    def __init__(self, *, interval_s: float, heartbeat_s: float, lead_steps: int) -> None:
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._lead_steps = lead_steps
        self.save_at = 0
        """The version to write; 0: none is due."""
        self._pace: deque[tuple[float, int]] = deque(maxlen=16)
        self._look_at_s = -math.inf

    def begin(self) -> None:
        self.save_at = 0
        self._pace.clear()
        self._look_at_s = -math.inf

    def is_due_to_look(self, now_s: float) -> bool:
        """True if `look` should be called now; it reads every peer's heartbeat."""
        return self._interval_s > 0 and now_s >= self._look_at_s

    def look(self, beats: Iterable[Heartbeat], now_s: float, *, elapsed_s: float) -> None:
        """Choose a version if a snapshot is due. Args: beats: the newest of every live peer in the live era."""
        self._look_at_s = now_s + self._heartbeat_s / 2
        members = [beat for beat in beats if beat.synced and beat.stage is not None]
        if not members:
            return
        newest = max(beat.version for beat in members)
        self._pace.append((now_s, newest))
        if self.save_at > min(beat.version for beat in members):
            return  # a member has not reached it yet
        self.save_at = 0
        if max(beat.unsaved_s for beat in members) >= min(self._interval_s, max(_FIRST_S, elapsed_s / 2.0)):
            (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
            steps_per_s = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
            ahead = math.ceil(steps_per_s * _NOTICE_HEARTBEATS * self._heartbeat_s)
            self.save_at = newest + self._lead_steps + ahead
