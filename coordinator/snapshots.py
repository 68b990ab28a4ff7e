"""Says when every stage writes a snapshot of the same version, so that all of them together are a whole one. Pure.

A peer tells in its heartbeats how long ago its stage last wrote a snapshot (`Heartbeat.unsaved_s`). Once that is too
long ago for any peer, the coordinator names a version that no stage has come to yet, in its replies to heartbeats
(`HeartbeatReply.save_at`). A stage that hears of it too late has no snapshot of that version; it goes on saying that it
is unsaved, and the coordinator names another one. Nothing of this is handed over: what a new coordinator needs is in
the next heartbeats.

A young run writes sooner: after `_FIRST_S`, and each time that it is twice as old. So a run that goes back loses half
of its time at most, once its first snapshot and the copies of it are written.
"""

import math
from collections import deque
from collections.abc import Iterable

from shoal.protocol.messages import Heartbeat

_NOTICE_HEARTBEATS = 2.5
"""Every peer hears of a version so long ahead: a heartbeat of each peer until the version is named in the replies, with
room for a heartbeat that is late."""
_PACE_SAMPLES = 16
_FIRST_S = 30.0
"""Seconds until the first snapshot. Until then layers that one peer alone holds have no copy anywhere."""


class SnapshotSchedule:
    """Names the versions to save.

    Args:
        interval_s: of the clock between two snapshots; 0: none by the clock.
        lead_steps: how many versions one stage may be ahead of another.
    """

    def __init__(self, *, interval_s: float, heartbeat_s: float, lead_steps: int) -> None:
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._lead_steps = lead_steps
        self._save_at = 0
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE_SAMPLES)
        self._look_at_s = -math.inf

    def begin(self) -> None:
        """Another era begins, or a term of ours: versions have nothing to do with those before."""
        self._save_at = 0
        self._pace.clear()
        self._look_at_s = -math.inf

    def is_due_to_look(self, now_s: float) -> bool:
        """Whether to call `look` now: it reads every peer's heartbeat, and each heartbeat asks."""
        return self._interval_s > 0 and now_s >= self._look_at_s

    def look(self, beats: Iterable[Heartbeat], now_s: float, *, elapsed_s: float) -> None:
        """Name a version if a snapshot is due.

        Args:
            beats: the newest of every peer that is alive, of the live era.
            elapsed_s: since the run began.
        """
        self._look_at_s = now_s + self._heartbeat_s / 2
        members = [beat for beat in beats if beat.synced and beat.stage is not None]
        if not members:
            return
        newest = max(beat.version for beat in members)
        self._pace.append((now_s, newest))
        if self._save_at > min(beat.version for beat in members):
            return  # somebody has not come to it yet
        self._save_at = 0
        if max(beat.unsaved_s for beat in members) >= min(self._interval_s, max(_FIRST_S, elapsed_s / 2.0)):
            ahead = math.ceil(self._steps_per_s * _NOTICE_HEARTBEATS * self._heartbeat_s)
            self._save_at = newest + self._lead_steps + ahead

    @property
    def save_at(self) -> int:
        """The version to write; 0: none is due."""
        return self._save_at

    @property
    def _steps_per_s(self) -> float:
        (first_s, first), (last_s, last) = self._pace[0], self._pace[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0
