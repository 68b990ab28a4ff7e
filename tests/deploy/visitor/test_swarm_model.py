"""An evaluation through a swarm is one of one version: where that is lost, it begins again."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import torch

from shoal.deploy.visitor import swarm_model
from shoal.deploy.visitor.swarm_model import SwarmModel, SwarmPredictor, through_swarm
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec

TOKENS_BT = torch.zeros(1, 4, dtype=torch.int64)


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the next questions are answered with."""
    left: list[int] = []

    async def answers(self: SwarmModel, tokens_BT, targets_BT, begins_BT=None):
        self.answered.add((0, left.pop(0)))
        return torch.zeros(tokens_BT.shape), torch.ones(tokens_BT.shape, dtype=torch.bool)

    @contextlib.asynccontextmanager
    async def entering(invite):
        yield SimpleNamespace(endpoint=None, peers=[], spec=RunSpec())

    monkeypatch.setattr(SwarmModel, "log_likelihoods", answers)
    monkeypatch.setattr(swarm_model, "entering", entering)
    return left


def evaluated(*, keeps_version: bool) -> tuple[int | None, int]:
    """(the version of three questions, how often they were begun)."""
    begun = 0

    def work(predictor: SwarmPredictor) -> int | None:
        nonlocal begun
        begun += 1
        for _ in range(3):
            predictor.loss_sum(TOKENS_BT, TOKENS_BT)
        return None if predictor.origin is None else predictor.origin.version

    invite = SimpleNamespace(run="run")
    asked = through_swarm(invite, work, tokenizer=lambda spec: None, keeps_version=keeps_version)  # type: ignore[arg-type]
    return asyncio.run(asked), begun


def test_an_evaluation_begins_again_with_the_version_that_answers_now(versions: list[int]) -> None:
    versions += [4, 4, 7, 7, 8, 8, 8, 8]
    assert evaluated(keeps_version=True) == (8, 3)


def test_one_that_loses_every_version_says_so(versions: list[int]) -> None:
    versions += range(20)
    with pytest.raises(LocalError, match="repartitioned meanwhile, 5 times"):
        evaluated(keeps_version=True)


def test_what_needs_no_single_version_goes_on(versions: list[int]) -> None:
    versions += [4, 7, 8]
    assert evaluated(keeps_version=False) == (None, 1)
