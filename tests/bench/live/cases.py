"""The swarms of `live_swarm.py`: shipped scenarios, six equal machines, and random uneven networks."""

from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from shoal.deploy.simulate.scenario import STEPS_MAX, Scenario, find_scenario
from shoal.protocol.spec import ModelSpec, OptimizerSpec, RunSpec, SwarmSpec, TrainingSpec, WireSpec
from shoal.protocol.topology import Topology, make_topology
from shoal.protocol.wire_format import WireFormat

SHIPPED = ("data-centre", "two-universities", "mixed-cards", "eight-cities", "home-gpus", "spot-fleet")
SIX_EQUAL = "six-equal"
GPT3_XL = ModelSpec(
    vocab_size=50_304, dim=2048, num_layers=24, num_heads=16, num_kv_heads=16, ffn_dim=5461, context=2048
)
DEMO_MODEL = ModelSpec(vocab_size=256, dim=128, num_layers=6, num_heads=4, num_kv_heads=2, ffn_dim=352, context=128)


def case(name: str) -> Scenario:
    """A swarm by name: a shipped scenario, `six-equal`, or `uneven-SEED`; none of them has churn."""
    if name == SIX_EQUAL:
        return six_equal()
    if name.startswith("uneven-"):
        return uneven(int(name.removeprefix("uneven-")))
    found = find_scenario(name)
    return replace(found, trace=None, churn=None, seconds=None)


def six_equal() -> Scenario:
    """Six machines beside each other on 10 Gbit/s that compute as a CPU does, and the demo's model."""
    spec = spec_of(SIX_EQUAL, DEMO_MODEL, microbatches=16, microbatch_size=2)
    topology = make_topology(
        np.full((6, 6), 1e-4),
        np.full((6, 6), 1.25e9),
        flop_per_s=5e10,
        memory_bytes=16e9,
        up_bytes_per_s=1.25e9,
        down_bytes_per_s=1.25e9,
    )
    return scenario_of(SIX_EQUAL, "six equal machines", topology, spec)


def uneven(seed: int) -> Scenario:
    """6 to 64 devices of `sample_networks.random_network`, and a model that the smaller of them need two dozen for."""
    from sample_networks import random_network

    num_devices = int(np.random.default_rng(seed).integers(6, 65))
    topology = random_network(num_devices, seed)
    spec = spec_of(f"uneven-{seed}", GPT3_XL, microbatches=256, microbatch_size=1)
    return scenario_of(f"uneven-{seed}", f"{num_devices} devices of random sites, seed {seed}", topology, spec)


def spec_of(name: str, model: ModelSpec, *, microbatches: int, microbatch_size: int) -> RunSpec:
    return RunSpec(
        name=name,
        model=model,
        training=TrainingSpec(
            steps=STEPS_MAX,
            microbatches_per_step=microbatches,
            microbatch_size=microbatch_size,
            s_max=1,
            keep="recompute" if model is GPT3_XL else "stash",
            validation_interval_steps=0,
        ),
        optimizer=OptimizerSpec(warmup_steps=0),
        wire=WireSpec(gradients="bf16") if model is GPT3_XL else WireSpec(),
        swarm=SwarmSpec(stages=1, min_peers=1),
    )


def scenario_of(name: str, title: str, topology: Topology, spec: RunSpec) -> Scenario:
    return Scenario(
        name=name,
        title=title,
        topology=topology,
        spec=spec,
        stages=None,
        seconds=None,
        watts=(None,) * topology.num_devices,
        network=None,
        trace=None,
        churn=None,
        strategies=(),
    )


def with_steps(scenario: Scenario, steps: int) -> Scenario:
    training = msgspec.structs.replace(scenario.spec.training, steps=steps)
    return replace(scenario, spec=msgspec.structs.replace(scenario.spec, training=training))


def with_wire(scenario: Scenario, forth: WireFormat, back: WireFormat | Literal[""], sums: WireFormat) -> Scenario:
    """The same with other formats on the wire. `back` is empty where it goes with `forth`."""
    wire = WireSpec(activations=forth, activation_gradients=back or None, gradients=sums)
    spec = msgspec.structs.replace(scenario.spec, wire=wire)
    return replace(scenario, name=f"{scenario.name}, {forth}/{back}/{sums}", spec=spec)


def coarser(scenario: Scenario, times: int) -> Scenario:
    """The same tokens a step in fewer microbatches that are larger by as much, which is fewer events."""
    if times == 1:
        return scenario
    training = scenario.spec.training
    training = msgspec.structs.replace(
        training,
        microbatches_per_step=max(1, training.microbatches_per_step // times),
        microbatch_size=training.microbatch_size * times,
    )
    spec = msgspec.structs.replace(scenario.spec, training=training)
    return replace(scenario, name=f"{scenario.name}/{times}", spec=spec)


def in_subspace(scenario: Scenario, numbers: int) -> Scenario:
    """The same with its model in a subspace of so many numbers a token."""
    model = msgspec.structs.replace(scenario.spec.model, subspace=numbers)
    return replace(scenario, spec=msgspec.structs.replace(scenario.spec, model=model))
