"""How fast a processor is said to be that a control group holds back."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.deploy.manners.limits import Limits
from shoal.deploy.session import session
from shoal.deploy.session.session import Options, Ways


@pytest.mark.parametrize(
    ("threads", "quota", "share", "times"),
    [(1, 64.0, 1.0, 1.0), (1, 0.25, 1.0, 4.0), (4, 2.0, 1.0, 2.0), (1, 0.25, 0.5, 4.0), (1, 1.0, 0.5, 2.0)],
)
def test_a_probe_takes_as_long_as_the_quota_and_the_share_take_to_earn_it(
    threads: int, quota: float, share: float, times: float, tmp_path: Path, monkeypatch: Any
) -> None:
    worked_s = 0.0

    def work() -> None:
        nonlocal worked_s
        worked_s += 0.5

    async def probe() -> float:
        options = Options(
            name="one",
            folder=tmp_path,
            ways=Ways(listen=()),
            threads=threads,
            device=torch.device("cpu"),
            reports=False,
            limits=Limits(compute_share=share),
            reread_limits=Limits,
        )
        compute = session._make_compute(options)
        timed = await compute.run("probe", work, flop=1.0)
        compute.close()
        return timed.ended_s - timed.started_s

    monkeypatch.setattr(session, "processors", lambda: quota)
    monkeypatch.setattr(time, "thread_time", lambda: worked_s)
    assert asyncio.run(probe()) == pytest.approx(0.5 * times)
