"""The work of one expert's holder: it serves tokens, and counts the microbatches that senders report as finished."""

import logging
from typing import Protocol

from shoal.peer.compute.arithmetic import HeldExpert
from shoal.peer.model.state import StageState
from shoal.peer.pipeline.expert_runs import Run
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.identity import PeerID

logger = logging.getLogger(__name__)


class Upwards(Protocol):
    """The unit's group, as seen by the work."""

    @property
    def serves(self) -> bool:
        """True if we hold the group's state and take part."""
        ...

    def wants(self, microbatch: Microbatch) -> bool: ...

    def contributed(self, microbatch: Microbatch, *, loss: float, staleness_steps: int, retried: bool) -> None: ...


class Requests(Protocol):
    """The requests for experts that wait on this peer (`server.py`)."""

    def add(self, work: "ExpertWork") -> None:
        """Accept requests for the expert of `work` from now on."""
        ...

    def remove(self, work: "ExpertWork") -> None:
        """Accept no more requests for the expert of `work`."""
        ...

    def wake(self) -> None:
        """Check the waiting requests again: an expert has another version, or is gone."""
        ...

    def num_pending(self, work: "ExpertWork") -> int:
        """Return the number of waiting requests that name the expert of `work`."""
        ...


class ExpertWork:
    """Expert `expert` of stage `stage` at its holder. `version` changes only on the loop's thread."""

    def __init__(self, runtime: HeldExpert, stage: int, *, server: Requests, upwards: Upwards) -> None:
        self.runtime = runtime
        self.stage = stage
        self.expert = runtime.expert
        self.upwards = upwards
        self.version = 0
        self.is_paused = False
        self._server = server
        self._closed = False

    @property
    def serves(self) -> bool:
        return self.upwards.serves and not self._closed

    @property
    def is_idle(self) -> bool:
        return not self._server.num_pending(self) and not self.runtime.num_open

    def install(self) -> None:
        self._server.add(self)

    def close(self) -> None:
        self._closed = True
        self._server.remove(self)

    def load(self, state: StageState) -> None:
        self.runtime.load(state)
        self.version = state.version
        self._server.wake()

    def pause(self, is_paused: bool) -> None:
        self.is_paused = is_paused
        self._server.wake()  # waiting requests are refused

    def wake(self) -> None:
        self._server.wake()

    # --- told by the server ---

    def flop(self, num_tokens: int, *, backward: bool) -> float:
        return self.runtime.backward_flop(num_tokens) if backward else self.runtime.forward_flop(num_tokens)

    def has_whole(self, run: Run, num_layers: int) -> bool:
        return self.runtime.layers_done(run) == num_layers

    def close_run(self, run: Run, *, retried: bool) -> None:
        """End a run: it counts if the group lacks it."""
        staleness_steps = self.runtime.close(run, wanted=self.upwards.wants(run.microbatch))
        if staleness_steps is not None:
            self.upwards.contributed(run.microbatch, loss=0.0, staleness_steps=staleness_steps, retried=retried)

    def source_lost(self, peer: PeerID, successor: int | None = None) -> None:
        self.runtime.drop(peer, successor)
