"""The measured speed of a device whose peer stands by."""

import asyncio
from typing import Any

import pytest

from shoal.peer.driver import PROBE_EVERY_S
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import RunSpec


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
