"""What a replica keeps of the microbatches that are here, and what of it a job takes and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.peer.arithmetic import DenseRuntime, TrunkRuntime
from shoal.peer.experts.dispatch import ExpertDispatch
from shoal.peer.experts.passage import Passage
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.job import Job
from shoal.protocol.ports import Payload


@dataclass(slots=True)
class Cargo:
    """One microbatch's."""

    input: Payload | None = None
    """The activation, from its arrival until the forward. One that comes again is not kept."""
    output: Payload | None = None
    """What we send next for it; kept until it is answered."""
    gradient: Payload | None = None
    """From its arrival until the backward."""
    waited_s: float = 0.0
    """How long its activation stood in line to leave."""
    passage: Passage | None = None
    """Of this run through the experts, where those are placed: the same for the forward and the backward."""
    is_wanted: bool = True
    """False: it is computed for the other stages only. Our group has its gradient."""


class Hold:
    """The cargo of one replica.

    Args:
        lacks: (step, index) -> whether our group lacks the gradient of that microbatch.
        is_last: whether the replica is of the last stage, where a validation ends in a loss.
        experts: who computes the experts, if they are placed.
    """

    def __init__(
        self,
        runtime: DenseRuntime | TrunkRuntime,
        *,
        lacks: Callable[[int, int], bool],
        is_last: bool,
        experts: ExpertDispatch | None,
    ) -> None:
        self._runtime = runtime
        self._lacks = lacks
        self._is_last = is_last
        self._experts = experts
        self._cargo: dict[Microbatch, Cargo] = {}

    def of(self, microbatch: Microbatch) -> Cargo:
        """The cargo of `microbatch`, an empty one if it is new here."""
        cargo = self._cargo.get(microbatch)
        if cargo is None:
            cargo = self._cargo[microbatch] = Cargo()
        return cargo

    def get(self, microbatch: Microbatch) -> Cargo | None:
        """The cargo of `microbatch`, if there is any."""
        return self._cargo.get(microbatch)

    def job(self, job: Job, microbatch: Microbatch) -> tuple[Callable[[], Any], float]:
        """The job of a microbatch as a function for the device's thread, and its arithmetic in FLOP. What it takes is
        kept no longer."""
        runtime, cargo = self._runtime, self.of(microbatch)
        if job.kind == "backward":
            gradient, cargo.gradient = cargo.gradient, None
            assert gradient is not None, f"a backward of {microbatch} without its gradient"
            return (lambda: runtime.backward(microbatch, gradient)), runtime.flop.backward
        payload, cargo.input = cargo.input, None
        wanted = microbatch.validates or self._lacks(microbatch.step, microbatch.index)
        cargo.is_wanted = cargo.is_wanted and wanted
        if job.kind == "validate":
            return (lambda: runtime.validate(microbatch, payload)), runtime.flop.forward
        if job.kind == "loss":
            return (lambda: runtime.loss(microbatch, payload, contributes=wanted)), runtime.flop.loss
        return (lambda: runtime.forward(microbatch, payload, contributes=wanted)), runtime.flop.forward

    def keep(self, job: Job, microbatch: Microbatch, value: Any) -> float | None:
        """What a job has computed is sent next. Returns: the loss, of a job that computes one."""
        loss = None
        if job.kind == "loss":
            loss, value = value
        elif job.kind == "validate" and self._is_last:
            loss, value = value, None
        self.of(microbatch).output = value
        return loss

    def settle(self, microbatch: Microbatch, *, again: bool) -> bool:
        """The backward of `microbatch` is done. Returns: whether its gradient is wanted here."""
        cargo = self.of(microbatch)
        passage, cargo.passage = cargo.passage, None
        if passage is not None and self._experts is not None:
            self._experts.settle(passage, again=again)  # its experts' holders may count it
        return cargo.is_wanted

    def forget(self, microbatch: Microbatch) -> None:
        """Nobody will ask for `microbatch` any more."""
        cargo = self._cargo.pop(microbatch, None)
        if cargo is not None:
            self._abandon(cargo)
        self._runtime.forget(microbatch)

    def passage(self, experts: ExpertDispatch, job: Job, microbatch: Microbatch) -> Passage:
        """This run of the microbatch through the experts: the same for its forward and its backward."""
        cargo = self.of(microbatch)
        if job.kind != "backward":
            self._abandon(cargo)
            cargo.passage = experts.begin(microbatch)
        assert cargo.passage is not None, "a backward of a microbatch that has not been through the experts"
        return cargo.passage

    def _abandon(self, cargo: Cargo) -> None:
        passage, cargo.passage = cargo.passage, None
        if passage is not None and self._experts is not None:
            self._experts.abandon(passage)
