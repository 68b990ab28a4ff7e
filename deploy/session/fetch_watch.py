"""Estimates the remaining time of a fetch, the download of a stage's state from other peers."""

from shoal.deploy.record.report import Phase
from shoal.peer.handoff.fetcher import FetchProgress


class FetchWatch:
    """Reports the progress of a fetch, and estimates the remaining time from the rate so far."""

    def __init__(self) -> None:
        self._progress: FetchProgress | None = None
        self._began_s = 0.0

    def look(self, progress: FetchProgress | None, now_s: float) -> Phase | None:
        """Return a phase to report; None: nothing is new. A phase without `part` means that the fetch has ended."""
        if progress is not self._progress:
            self._progress, self._began_s = progress, now_s
            if progress is None:
                return Phase(name="catching up")
        if progress is None:
            return None
        part = progress.done / progress.total if progress.total else 0.0
        left_s = (now_s - self._began_s) * (1.0 - part) / part if part > 0.0 else None
        return Phase(name=f"fetching {progress.what}", part=part, left_s=left_s)
