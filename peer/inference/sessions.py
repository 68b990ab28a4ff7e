"""What one stage remembers for those who ask: weights of a version for a while, and keys and values of sessions."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shoal.peer.model.generate import KeysValues
from shoal.peer.pipeline.fixed_stage import FixedStage
from shoal.protocol.identity import PeerID

FIXED_MAX: Final = 2
"""Versions at once. One takes as much memory as the stage's parameters; plans do not count it, so it goes where a job
finds no memory."""
IDLE_S: Final = 60.0
"""What nobody has asked for so long is dropped. On a device of which its owner lends a tenth a question takes long."""
YIELDS_S: Final = 3.0
"""A version that nobody has asked for so long makes room for another one."""
SESSIONS_MAX: Final = 8
SESSIONS_BYTES_MAX: Final = 256 << 20
"""Of keys and values, all sessions together; one there may be in any case."""

Layers = tuple[int, int]
Session = tuple[PeerID, int]
"""(the peer that was asked, the asker's number)."""


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
    """Tokens remembered; -1: a request has failed in the middle, and nobody knows."""


@dataclass(slots=True)
class Sessions:
    """Of one peer. Whoever uses it says when it is."""

    _fixed: dict[int, _Fixed] = field(default_factory=dict)
    _known: OrderedDict[Session, _Known] = field(default_factory=OrderedDict)

    @property
    def is_empty(self) -> bool:
        return not self._fixed

    def fixed(self, version: int, layers: Layers, now_s: float) -> FixedStage | None:
        """The stage at `version`, if it is here."""
        found = self._fixed.get(version)
        if found is None or found.layers != layers:
            return None
        found.used_s = now_s
        return found.stage

    def newest(self, layers: Layers) -> int:
        """-1: there is none."""
        return max((version for version, fixed in self._fixed.items() if fixed.layers == layers), default=-1)

    def has_room(self, now_s: float) -> bool:
        """Whether one more version may be kept, maybe in the place of one that is not asked for any more."""
        return len(self._fixed) < FIXED_MAX or any(now_s - f.used_s >= YIELDS_S for f in self._fixed.values())

    def keep(self, version: int, stage: FixedStage, layers: Layers, now_s: float) -> None:
        if len(self._fixed) >= FIXED_MAX:
            del self._fixed[min(self._fixed, key=lambda v: self._fixed[v].used_s)]
        self._fixed[version] = _Fixed(stage, layers, now_s)

    def begin(self, session: Session, version: int, stage: FixedStage, num_bytes: int, now_s: float) -> None:
        """Begin a session anew. The oldest ones go where there are too many."""
        self._known.pop(session, None)
        while self._known and (
            len(self._known) >= SESSIONS_MAX
            or sum(known.num_bytes for known in self._known.values()) + num_bytes > SESSIONS_BYTES_MAX
        ):
            self._known.popitem(last=False)
        self._known[session] = _Known(version, stage.memory(), num_bytes, now_s)

    def memory(self, session: Session, version: int, position: int, now_s: float) -> Mapping[str, KeysValues] | None:
        """What the session remembers of the tokens before `position`; None: not that. `remembered` must follow."""
        known = self._known.get(session)
        if known is None or (known.version, known.length) != (version, position):
            return None
        known.used_s, known.length = now_s, -1
        self._known.move_to_end(session)
        return known.memory

    def remembered(self, session: Session, length: int) -> None:
        """Its memory has so many tokens now."""
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
