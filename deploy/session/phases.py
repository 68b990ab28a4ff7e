"""How far a peer is with joining, and with fetching its state, as reports."""

from shoal.deploy.report import Phase
from shoal.peer.handoff.fetcher import FetchProgress

_USUAL_S = {
    "starting the network": 2.0,
    "looking for the run": 3.0,
    "reading the text": 2.0,
    "measuring this machine": 4.0,
}
"""How long each phase takes on an idle machine of two cores, with peers that answer. Only the bar follows from it."""


def expected(name: str, spent_s: float) -> Phase:
    """How far joining has come, `spent_s` after it began with the phase `name`; a phase that lasts holds the bar up."""
    names = list(_USUAL_S)
    index = names.index(name)
    before_s = sum(_USUAL_S[other] for other in names[:index])
    here_s = min(spent_s, _USUAL_S[name])
    total_s = sum(_USUAL_S.values())
    return Phase(name=name, part=(before_s + here_s) / total_s, left_s=total_s - before_s - here_s)


class FetchWatch:
    """How long a fetch of state still takes, by its pace so far."""

    def __init__(self) -> None:
        self._progress: FetchProgress | None = None
        self._began_s = 0.0

    def look(self, progress: FetchProgress | None, now_s: float) -> Phase | None:
        """What to say now. None: there is nothing new. A phase without a part says that the fetch is over."""
        if progress is not self._progress:
            over = progress is None
            self._progress, self._began_s = progress, now_s
            if over:
                return Phase(name="catching up")
        if progress is None:
            return None
        part = progress.done / progress.total if progress.total else 0.0
        left_s = (now_s - self._began_s) * (1.0 - part) / part if part > 0.0 else None
        return Phase(name="fetching state", part=part, left_s=left_s)
