"""Where a small model is trained as if it were a large one: devices of a network, and how much slower they must be."""

import itertools

import numpy as np

from shoal.peer.model.flop import forward_flop
from shoal.peer.model.layout import all_layer_keys
from shoal.protocol.spec import RunSpec
from shoal.protocol.tensors import BACKWARD_PER_FORWARD
from shoal.protocol.topology import Topology


def devices_of(topology: Topology, stages: int, replicas: int) -> list[list[int]]:
    """One region a stage, in the order of the shortest way through them; several stages a region where there are fewer.

    Raises: ValueError: too few devices.
    """
    by_region: dict[str, list[int]] = {}
    for device in range(topology.num_devices):
        by_region.setdefault(topology.regions[device], []).append(device)
    regions = list(by_region)[:stages]
    heads = [by_region[region][0] for region in regions]
    latency_s = topology.latency_s[np.ix_(heads, heads)]

    def length_s(order: tuple[int, ...]) -> float:
        return float(sum(latency_s[a, b] for a, b in itertools.pairwise(order)))

    order = min(itertools.permutations(range(len(regions))), key=length_s)
    places = [regions[order[stage * len(regions) // stages]] for stage in range(stages)]
    chosen = []
    for place in places:
        if len(by_region[place]) < replicas:
            raise ValueError(f"{place or 'the network'} has too few devices for {stages} stages of {replicas}")
        chosen.append([by_region[place].pop(0) for _ in range(replicas)])
    return chosen


def slowed_down(topology: Topology, large: RunSpec, small: RunSpec) -> Topology:
    """So that a microbatch of `small` takes devices and links as long as one of `large`."""
    compute = _flop(small) / _flop(large)
    message = _message_bytes(small) / _message_bytes(large)
    return Topology(
        latency_s=topology.latency_s.copy(),
        bytes_per_s=topology.bytes_per_s * message,
        flop_per_s=topology.flop_per_s * compute,
        memory_bytes=topology.memory_bytes.copy(),
        up_bytes_per_s=topology.up_bytes_per_s * message,
        down_bytes_per_s=topology.down_bytes_per_s * message,
        card=topology.card.copy(),
        names=topology.names,
        regions=topology.regions,
        may_feed=topology.may_feed.copy(),
    )


def _flop(spec: RunSpec) -> float:
    """Of a microbatch through all layers, forward and backward."""
    tokens = spec.training.microbatch_size * spec.model.context
    forward = sum(forward_flop(spec.model, key, tokens) for key in all_layer_keys(spec.model))
    return (1 + BACKWARD_PER_FORWARD) * forward


def _message_bytes(spec: RunSpec) -> float:
    width = 4 if spec.wire.activations == "fp32" else 2
    return float(spec.training.microbatch_size * spec.model.context * spec.model.dim * width)
