"""The payloads that a replica keeps for its microbatches, and the jobs that use them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.peer.experts.dispatch import ExpertDispatch
from shoal.peer.pipeline.expert_passage import Passage
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import StageShard
from shoal.peer.replica.job import Job
from shoal.peer.replica.views import GroupView
from shoal.protocol.ports import Payload


@dataclass(slots=True)
class MicrobatchPayloads:
    """The payloads of one microbatch."""

    input: Payload | None = None
    """The activation, from its arrival until the forward. A repeated one is not kept."""
    output: Payload | None = None
    """The next payload to send; kept until it is answered."""
    gradient: Payload | None = None
    waited_s: float = 0.0
    """How long the activation waited for its link."""
    passage: Passage | None = None
    """The current run through experts on other peers: the same for forward and backward."""
    is_wanted: bool = True
    """False: the gradient is computed only for the other stages; our group has it already."""


class ActivationStore:
    """The cargo of one replica.

    Args:
        is_last: the replica is in the last stage, where a validation ends in a loss.
        experts: dispatches tokens to other peers; None: the stage holds its experts.
    """

    def __init__(
        self,
        runtime: StageShard,
        group: GroupView,
        *,
        is_last: bool,
        experts: ExpertDispatch | None,
    ) -> None:
        self._runtime = runtime
        self._group = group
        self._is_last = is_last
        self._experts = experts
        self._payloads: dict[Microbatch, MicrobatchPayloads] = {}

    def of(self, microbatch: Microbatch) -> MicrobatchPayloads:
        return self._payloads.setdefault(microbatch, MicrobatchPayloads())

    def get(self, microbatch: Microbatch) -> MicrobatchPayloads | None:
        return self._payloads.get(microbatch)

    def job(self, job: Job, microbatch: Microbatch) -> tuple[Callable[[], Any], float]:
        """Return a microbatch's job for the device's thread and its FLOP. The job's input leaves the cargo."""
        runtime, payloads = self._runtime, self.of(microbatch)
        if job.kind == "backward":
            gradient, payloads.gradient = payloads.gradient, None
            assert gradient is not None, f"a backward of {microbatch} without its gradient"
            return (lambda: runtime.backward(microbatch, gradient)), runtime.flop.backward
        payload, payloads.input = payloads.input, None
        wanted = microbatch.validates or self._group.lacks(microbatch.step, microbatch.index)
        payloads.is_wanted = payloads.is_wanted and wanted
        if job.kind == "validate":
            return (lambda: runtime.validate(microbatch, payload)), runtime.flop.forward
        if job.kind == "loss":
            return (lambda: runtime.loss(microbatch, payload, contributes=wanted)), runtime.flop.loss
        return (lambda: runtime.forward(microbatch, payload, contributes=wanted)), runtime.flop.forward

    def keep(self, job: Job, microbatch: Microbatch, value: Any) -> float | None:
        """Keep the result of a job as the next payload to send. Returns: the loss, if the job computes one."""
        loss = None
        if job.kind == "loss":
            loss, value = value
        elif job.kind == "validate" and self._is_last:
            loss, value = value, None
        self.of(microbatch).output = value
        return loss

    def settle(self, microbatch: Microbatch, *, retried: bool) -> bool:
        """End the backward of `microbatch`. Returns: True if our group wants its gradient."""
        payloads = self.of(microbatch)
        passage, payloads.passage = payloads.passage, None
        if passage is not None and self._experts is not None:
            self._experts.settle(passage, retried=retried)  # the holders of its experts may count it
        return payloads.is_wanted

    def forget(self, microbatch: Microbatch) -> None:
        payloads = self._payloads.pop(microbatch, None)
        if payloads is not None:
            self._abandon(payloads)
        self._runtime.forget(microbatch)

    def passage(self, experts: ExpertDispatch, job: Job, microbatch: Microbatch) -> Passage:
        """Return the microbatch's run through the experts: a new one for a forward, the same for its backward."""
        payloads = self.of(microbatch)
        if job.kind != "backward":
            self._abandon(payloads)
            payloads.passage = experts.begin(microbatch)
        assert payloads.passage is not None, "a backward of a microbatch that has not been through the experts"
        return payloads.passage

    def _abandon(self, payloads: MicrobatchPayloads) -> None:
        passage, payloads.passage = payloads.passage, None
        if passage is not None and self._experts is not None:
            self._experts.abandon(passage)
