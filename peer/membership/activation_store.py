"""Keeps the payloads (encoded tensors) of a replica's microbatches, and makes the device's jobs from them."""

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
    """The activation, from its arrival until the forward. A second copy that arrives is not kept."""
    output: Payload | None = None
    """The next payload to send. An activation stays until the gradient is back, so that it can be sent again."""
    gradient: Payload | None = None
    """The gradient, from its arrival until the backward."""
    waited_s: float = 0.0
    """Seconds for which our output, an activation, waited at its link behind earlier frames."""
    passage: Passage | None = None
    """The microbatch's run through experts on other peers, from its forward to its backward; None: not begun."""
    is_wanted: bool = True
    """False: our group has this microbatch's gradient; our backward only makes that for the stages before ours."""


class ActivationStore:
    """The payloads of all microbatches that are at one replica.

    Args:
        is_last: the replica is in the last stage, where a validation microbatch ends in a loss.
        experts: sends tokens to experts on other peers; None: the stage holds its own experts.
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
        """Return (the function that computes the job on the device's thread, its FLOP). Drop the job's input."""
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
        """Keep the payload that a job made, to be sent on. Returns: the loss; None: the job computed no loss."""
        loss = None
        if job.kind == "loss":
            loss, value = value
        elif job.kind == "validate" and self._is_last:
            loss, value = value, None
        self.of(microbatch).output = value
        return loss

    def settle(self, microbatch: Microbatch, *, retried: bool) -> bool:
        """Record the end of `microbatch`'s backward. Returns: True if our group needs this gradient."""
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
        """Return the microbatch's run through experts on other peers: a forward begins it, a backward continues it."""
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
