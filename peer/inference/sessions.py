"""Keeps at one stage, for inference, the weights of recent versions, and the keys and values of clients' sessions."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.peer.model.generate import KeysValues
from shoal.peer.pipeline.fixed_stage import FixedStage
from shoal.protocol.identity import PeerID

FIXED_MAX: Final = 2
"""Most versions kept at once. Each takes as much memory as the stage's parameters; all are freed if memory is short."""
IDLE_S: Final = 60.0
"""Weights and sessions are dropped once they are unused for this many seconds. A device of which we may use only a
tenth answers slowly, so the time is long."""
YIELDS_S: Final = 3.0
"""A version that is unused for so many seconds may be replaced by another one."""
SESSIONS_MAX: Final = 8
SESSIONS_BYTES_MAX: Final = 256 << 20
"""Most bytes of the keys and values of all sessions together; a single session may exceed it."""

Layers = tuple[int, int]
Session = tuple[PeerID, int]
"""(the peer that the client asks, the number that the client gave to the session)."""


@dataclass(slots=True)
class _Fixed:
    stage: FixedStage
    layers: Layers
    used_s: float


@dataclass(slots=True)
class _Known:
    version: int
    memory: Mapping[str, KeysValues]
    num_bytes: int
    used_s: float
    length: int = 0
    """Number of tokens in the cache; -1 during a forward, and after a forward that failed halfway."""


@dataclass(slots=True)
class Sessions:
    """The weights and sessions that one peer keeps. The caller passes the present time `now_s`."""

    _fixed: dict[int, _Fixed] = field(default_factory=dict)
    _known: OrderedDict[Session, _Known] = field(default_factory=OrderedDict)

    @property
    def is_empty(self) -> bool:
        return not self._fixed

    def fixed(self, version: int, layers: Layers, now_s: float) -> FixedStage | None:
        found = self._fixed.get(version)
        if found is None or found.layers != layers:
            return None
        found.used_s = now_s
        return found.stage

    def newest(self, layers: Layers) -> int:
        """Return the newest version of these layers that is kept; -1: none is kept."""
        return max((version for version, fixed in self._fixed.items() if fixed.layers == layers), default=-1)

    def has_room(self, now_s: float) -> bool:
        """True if one more version may be kept, beside the others or in place of one that was unused for `YIELDS_S`."""
        return len(self._fixed) < FIXED_MAX or any(now_s - f.used_s >= YIELDS_S for f in self._fixed.values())

    def keep(self, version: int, stage: FixedStage, layers: Layers, now_s: float) -> None:
        if len(self._fixed) >= FIXED_MAX:
            del self._fixed[min(self._fixed, key=lambda v: self._fixed[v].used_s)]
        self._fixed[version] = _Fixed(stage, layers, now_s)

    def begin(self, session: Session, version: int, stage: FixedStage, num_bytes: int, now_s: float) -> None:
        """Begin a session with empty caches, even if it exists. If there are too many, drop those longest unused."""
        self._known.pop(session, None)
        while self._known and (
            len(self._known) >= SESSIONS_MAX
            or sum(known.num_bytes for known in self._known.values()) + num_bytes > SESSIONS_BYTES_MAX
        ):
            self._known.popitem(last=False)
        self._known[session] = _Known(version, stage.memory(), num_bytes, now_s)

    def memory(self, session: Session, version: int, position: int, now_s: float) -> Mapping[str, KeysValues] | None:
        """Return the session's cache if it ends at `position`, else None. Call `remembered` after the forward."""
        known = self._known.get(session)
        if known is None or (known.version, known.length) != (version, position):
            return None
        known.used_s, known.length = now_s, -1
        self._known.move_to_end(session)
        return known.memory

    def remembered(self, session: Session, length: int) -> None:
        if session in self._known:
            self._known[session].length = length

    def drop_idle(self, now_s: float) -> None:
        for version in [v for v, fixed in self._fixed.items() if now_s - fixed.used_s >= IDLE_S]:
            del self._fixed[version]
        for session in [s for s, known in self._known.items() if now_s - known.used_s >= IDLE_S]:
            del self._known[session]

    def clear(self) -> None:
        self._fixed.clear()
        self._known.clear()
