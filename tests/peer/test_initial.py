"""A run that begins with weights: the host has them, everybody gets their own layers of them and no others."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
import single_process
import torch

from shoal.peer.handoff.initial import bare_layer, first_state, layers_of, weights_digest
from shoal.peer.model.layout import all_layer_keys, init_layer
from shoal.peer.model.state import initial_state
from shoal.protocol.errors import LocalError
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import InitialSpec, RunSpec

CPU = torch.device("cpu")
NETWORK = uniform(latency_s=0.02, rate_bytes_per_s=1e7)


class Weights:
    """Implements `InitialWeights`; counts how often a layer was asked for."""

    def __init__(self, spec: RunSpec, seed: int = 77) -> None:
        self._spec, self._seed = spec, seed
        self.broken = False
        self.asked: list[str] = []

    def layer(self, key: str) -> torch.Tensor:
        return init_layer(self._spec.model, key, self._seed)

    async def read(self, keys: Sequence[str]) -> Mapping[str, torch.Tensor]:
        self.asked += keys
        if self.broken:
            raise LocalError("the folder is gone")
        return {key: self.layer(key) for key in keys if key in all_layer_keys(self._spec.model)}


@pytest.fixture
def weights(tiny_spec: RunSpec) -> Weights:
    return Weights(tiny_spec)


@pytest.fixture
def spec(tiny_spec: RunSpec, weights: Weights) -> RunSpec:
    digests = tuple(weights_digest(weights.layer(key)) for key in all_layer_keys(tiny_spec.model))
    return msgspec.structs.replace(tiny_spec, initial=InitialSpec(source="/host/only", digests=digests))


def test_a_digest_is_of_the_values_and_of_nothing_else() -> None:
    values_N = torch.arange(6.0)
    assert weights_digest(values_N) == weights_digest(torch.arange(12.0).view(6, 2)[:, 0] / 2)
    assert weights_digest(values_N) != weights_digest(values_N.flip(0))
    assert len(weights_digest(values_N)) == 32


def test_a_fetched_layer_has_the_digest_of_its_weights(weights: Weights) -> None:
    values_N = weights.layer("head")
    assert bare_layer(values_N).secure_digest() == weights_digest(values_N)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
def test_a_first_state_has_the_moments_that_one_from_the_seed_has(spec: RunSpec, optimizer: str) -> None:
    spec = msgspec.structs.replace(spec, optimizer=msgspec.structs.replace(spec.optimizer, name=optimizer))
    keys = ("embed", "layers.0")
    bare = {key: bare_layer(init_layer(spec.model, key, spec.seed)) for key in keys}
    assert first_state(spec, keys, bare, CPU).digest() == initial_state(spec, keys, CPU).digest()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_who_holds_experts_alone_begins_with_its_part_of_their_layer(spec: RunSpec, optimizer: str) -> None:
    """And checks it as a whole."""
    spec = msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, num_experts=4),
        optimizer=msgspec.structs.replace(spec.optimizer, name=optimizer),
    )
    keys = ("layers.1.experts.2", "layers.1.trunk", "head")
    assert layers_of(keys) == ("layers.1", "head")
    assert layers_of(("layers.12", "embed")) == ("layers.12", "embed")
    bare = {key: bare_layer(init_layer(spec.model, key, spec.seed)) for key in layers_of(keys)}
    assert first_state(spec, keys, bare, CPU).digest() == initial_state(spec, keys, CPU).digest()


def train(
    make_swarm: Callable[..., Any],
    spec: RunSpec,
    stages: list[list[str]],
    *,
    servers: Mapping[str, Weights],
    steps: int = 4,
    prepare: Callable[[Any], None] = lambda swarm: None,
) -> Any:
    """A swarm in which `servers` say that they have what the run begins with."""

    async def main() -> Any:
        swarm = make_swarm(spec, network=NETWORK)
        for name in [name for names in stages for name in names]:
            driver = await swarm.add(name)
            driver.server.initial = servers.get(name)
        prepare(swarm)
        swarm.obey(stages, not_started=True)
        await swarm.until_step(steps)
        await swarm.close()
        return swarm

    return run(main())


@pytest.mark.sim
@pytest.mark.parametrize("stages", [[["a"]], [["a"], ["b", "c"], ["d"]]], ids=["alone", "three stages"])
def test_a_swarm_trains_on_from_the_hosts_weights_as_one_process_would(
    make_swarm: Callable[..., Any],
    spec: RunSpec,
    weights: Weights,
    monkeypatch: pytest.MonkeyPatch,
    stages: list[list[str]],
) -> None:
    swarm = train(make_swarm, spec, stages, servers={"a": weights})
    monkeypatch.setattr(single_process, "init_layer", lambda model, key, seed: weights.layer(key))
    alone = [step.loss for step in single_process.train(spec, swarm.corpus, steps=4)]
    assert swarm.losses[:4] == pytest.approx(alone, abs=1e-5)
    assert sorted(weights.asked) == sorted(all_layer_keys(spec.model))  # read once, though a stage has two replicas


@pytest.mark.sim
def test_who_offers_other_weights_is_passed_over(
    make_swarm: Callable[..., Any], spec: RunSpec, weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    liars = [Weights(spec, seed) for seed in (1, 1)]
    servers = {"a": liars[0], "b": liars[1], "d": weights}
    swarm = train(make_swarm, spec, [["a"], ["b", "c"], ["d"]], servers=servers, steps=1)
    honest = train(make_swarm, spec, [["a"], ["b", "c"], ["d"]], servers={"d": weights}, steps=1)
    assert swarm.losses[0] == honest.losses[0]
    assert "not the weights that the run begins with" in caplog.text


@pytest.mark.sim
def test_who_goes_back_to_the_beginning_begins_with_the_same_weights(
    make_swarm: Callable[..., Any], spec: RunSpec, weights: Weights
) -> None:
    """A stage has died before the first snapshot; its host is a spare."""
    stages = [["a"], ["b"], ["c"]]

    async def main() -> list[list[float]]:
        swarm = make_swarm(spec, network=NETWORK)
        for name in ("a", "b", "c", "host"):
            (await swarm.add(name)).server.initial = weights if name == "host" else None
        lives = []
        for era in range(2):
            swarm.obey(stages, not_started=True, era=era, spares=("host",))
            await swarm.until_step(2)
            lives.append(swarm.losses[:2])
            swarm.commits.clear()
        await swarm.close()
        return lives

    first, second = run(main())
    assert first == second


@pytest.mark.sim
def test_a_host_that_was_away_when_the_plan_was_made_is_asked_when_it_is_back(
    make_swarm: Callable[..., Any], spec: RunSpec, weights: Weights
) -> None:
    stages = [["a"], ["b"], ["c"]]

    async def main() -> None:
        swarm = make_swarm(spec, network=NETWORK)
        for name in ("a", "b", "c", "host"):
            (await swarm.add(name)).server.initial = weights if name == "host" else None
        swarm.obey(stages, not_started=True)
        await asyncio.sleep(10.0)
        assert weights.asked == []
        swarm.obey(stages, not_started=True, spares=("host",))
        await swarm.until_step(1)
        await swarm.close()

    run(main())
    assert sorted(weights.asked) == sorted(all_layer_keys(spec.model))


@pytest.mark.sim
def test_weights_that_are_not_there_yet_are_waited_for(
    make_swarm: Callable[..., Any], spec: RunSpec, weights: Weights
) -> None:
    weights.broken = True

    def mend(swarm: Any) -> None:
        asyncio.get_running_loop().call_later(20.0, lambda: setattr(weights, "broken", False))

    swarm = train(make_swarm, spec, [["a"], ["b"], ["c"]], servers={"b": weights}, steps=1, prepare=mend)
    assert weights.asked.count("head") > 5
    assert swarm.losses
