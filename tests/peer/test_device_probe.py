"""The measured speed of a device: at first, and while its peer stands by."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.compute.probe import probe_device
from shoal.peer.driver import PROBE_EVERY_S
from shoal.peer.model.flop import forward_flop
from shoal.protocol.ports import JobKind, Timed
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec


class Throttled:
    """A device that does `flop_per_s` for the first 25 ms of each 100 ms, as a container with a quarter of a core."""

    def __init__(self, flop_per_s: float) -> None:
        self._flop_per_s, self._worked_s = flop_per_s, 0.0

    @property
    def _now_s(self) -> float:
        periods, burst_s = divmod(self._worked_s, 0.025)
        return 0.1 * periods + burst_s

    async def run(self, kind: JobKind, work: Callable[[], Any], *, flop: float) -> Timed[Any]:
        started_s = self._now_s
        self._worked_s += flop / self._flop_per_s
        return Timed(value=None, started_s=started_s, ended_s=self._now_s)


def test_a_probe_outlasts_the_burst_of_a_quota(tiny_spec: RunSpec) -> None:
    forward_s = 0.01
    flop = forward_flop(tiny_spec.model, "layers.0", tiny_spec.training.microbatch_size * tiny_spec.model.context)
    compute = Throttled(flop / forward_s)
    arithmetic = Arithmetic(tiny_spec, None, torch.device("cpu"))
    found = asyncio.run(probe_device(tiny_spec, compute, arithmetic, memory_bytes=1))  # type: ignore[arg-type]
    assert found.flop_per_s == pytest.approx(0.25 * flop / forward_s, rel=0.25)


def test_a_device_is_measured_again_while_its_peer_stands_by(make_swarm: Any, tiny_spec: RunSpec) -> None:
    async def main() -> tuple[float, float]:
        swarm = make_swarm(tiny_spec, network=uniform(0.01))
        for name in "abcd":
            await swarm.add(name)
        swarm.obey([["a"], ["b"], ["c"]], not_started=True, spares=("d",))
        for name in "ad":
            swarm.peer(name).compute.device_flop_per_s /= 2.0
        await asyncio.sleep(PROBE_EVERY_S + 2.0)
        works, stands_by = (swarm.drivers[name].advert().flop_per_s for name in "ad")
        await swarm.close()
        return works, stands_by

    works, stands_by = run(main())
    assert stands_by == pytest.approx(works / 2.0, rel=0.01)  # what `a` does now is shown by its jobs
