"""Networks on which tests and benchmarks try allocators: the five of the DT-FM paper, and random uneven ones of any
size."""

from dataclasses import dataclass

import numpy as np

from shoal.protocol.errors import LocalError
from shoal.protocol.topology import Floats, Topology, WorkloadEntry, make_topology

PAPER_WORKLOAD = WorkloadEntry(
    gradient_gigabytes_per_stage=0.65,
    activation_gigabytes_per_replica=0.47124922275543213,
    model="GPT-3 XL, 1.3 G parameters",
    num_layers=24,
    layers_per_stage=3,
    hidden_dim_of_model=2048,
    sequence_length_tokens=2048,
    global_batch_tokens=1e6,
)
"""Of 8 stages with 8 replicas each; the constants of the authors' code."""
PAPER_STAGES = 8
_CITIES = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
# Of each region with all later ones: (one way in ms, Gbit/s).
_Table = tuple[tuple[tuple[float, float], ...], ...]
_BETWEEN_CITIES: _Table = (
    ((67, 0.79), (49, 1.1), (96, 0.523), (124, 0.46), (136, 0.42), (143, 0.404), (124, 0.482)),
    ((11, 1.12), (143, 0.524), (172, 0.5), (76, 1.16), (90, 1.02), (67, 1.05)),
    ((130, 0.694), (159, 0.529), (86, 1.05), (99, 0.799), (77, 1.14)),
    ((34, 1.1), (210, 0.366), (223, 0.36), (199, 0.465)),
    ((238, 0.342), (235, 0.358), (228, 0.335)),
    ((14, 1.14), (12, 1.09)),
    ((24, 1.08),),
)
_STATES = ("Virginia", "Oregon", "California", "Ohio")
_BETWEEN_STATES: _Table = (((67, 1.15), (59, 1.05), (11, 1.12)), ((12, 1.25), (49, 1.1)), ((52, 1.02),))


def paper_network(case: int) -> Topology:
    """64 GPUs: 1 data centre on demand, 2 data centre spot, 3 universities, 4 four regions, 5 eight cities.

    Source: Yuan et al. 2022 (arXiv 2206.01288), tables of their appendix as in their code. Raises: LocalError.
    """
    match case:
        case 1:
            return _regions({f"instance_{i}": 8 for i in range(8)}, inside=(0, 100), others=_alike(8, (0, 3.125)))
        case 2:
            sizes = {f"spot_instance_{i}": 4 for i in range(8)} | {f"standalone_{i}": 1 for i in range(32)}
            return _regions(sizes, inside=(0, 100), others=_alike(40, (0, 1.25)))
        case 3:
            return _regions({"Ohio": 32, "Virginia": 32}, inside=(1, 5), others=_alike(2, (11, 1.12)))
        case 4:
            return _regions(dict.fromkeys(_STATES, 16), inside=(5, 2), others=_BETWEEN_STATES)
        case 5:
            return _regions(dict.fromkeys(_CITIES, 8), inside=(5, 2), others=_BETWEEN_CITIES)
    raise LocalError(f"the paper has cases 1 to 5, no {case}")


def _alike(count: int, link: tuple[float, float]) -> _Table:
    return tuple((link,) * later for later in range(count - 1, 0, -1))


def _regions(sizes: dict[str, int], *, inside: tuple[float, float], others: _Table) -> Topology:
    R = len(sizes)
    table = np.empty((R, R, 2))
    for i in range(R):
        table[i, i] = inside
        for j in range(i + 1, R):
            table[i, j] = table[j, i] = others[i][j - i - 1]
    region = np.repeat(np.arange(R), list(sizes.values()))
    links = table[np.ix_(region, region)]
    names = list(sizes)
    return make_topology(
        links[:, :, 0] * 1e-3, links[:, :, 1] * 1e9 / 8.0, regions=tuple(names[index] for index in region)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    town: int
    devices: int
    down_gbps: float
    up_gbps: float
    inside_ms: float
    inside_gbps: float
    last_mile_ms: float = 0.0
    is_server: bool = False
    tflops: float
    memory_gb: float


def random_network(num_devices: int, seed: int) -> Topology:
    """An uneven swarm, reproducible from its seed.

    3 to 10 towns lie anywhere in a square of 8,000 km, some large, some small. Devices come in sites until there are
    enough; each site is in one town and is, with equal chance,
    - a server of 2 to 8 GPUs: 0.02 ms and 50 to 200 Gbit/s inside, 3 to 10 Gbit/s to the world, both ways;
    - a laboratory of 2 to 6 single machines: 0.3 ms and 1 to 10 Gbit/s inside, 1 to 3 Gbit/s to the world;
    - a home with one GPU: 5 to 20 ms of last mile, 0.3 to 1 Gbit/s down and a third to all of that up.
    Between sites: 1 ms and 1 ms for each 100 km, stretched by up to a half, and the least of the sender's way up, the
    receiver's way down and the line, 3 Gbit/s nearby falling to 0.4 at the far end, less up to 40 % (drawn for each
    pair of sites). Speeds 10 to 100 TFLOP/s, memory 8 to 48 GB, one network card a server or machine.
    """
    rng = np.random.default_rng(seed)
    towns = rng.random((3 + int(8 * rng.random()), 2)) * 8000.0
    crowd = np.cumsum(0.1 + rng.random(len(towns)) ** 2)
    sites: list[_Site] = []
    while (rest := num_devices - sum(site.devices for site in sites)) > 0:
        town = int(np.searchsorted(crowd, float(rng.random()) * crowd[-1]))
        sites.append(_site(rng, town, rest))
    index = np.repeat(np.arange(len(sites)), [site.devices for site in sites])
    same = index[:, None] == index[None, :]

    def each(values: list[float]) -> Floats:
        return np.array(values)[index]

    latency_ms, gbps = _between_sites(towns, sites, rng)
    first = np.searchsorted(index, index)
    return make_topology(
        np.where(same, each([s.inside_ms for s in sites])[:, None], latency_ms[np.ix_(index, index)]) * 1e-3,
        np.where(same, each([s.inside_gbps for s in sites])[:, None], gbps[np.ix_(index, index)]) * 1e9 / 8.0,
        flop_per_s=each([s.tflops for s in sites]) * 1e12,
        memory_bytes=each([s.memory_gb for s in sites]) * 1e9,
        up_bytes_per_s=each([s.up_gbps for s in sites]) * 1e9 / 8.0,
        down_bytes_per_s=each([s.down_gbps for s in sites]) * 1e9 / 8.0,
        card=np.where(each([s.is_server for s in sites]), first, np.arange(num_devices)),
        regions=tuple(f"town-{sites[i].town}" for i in index),
    )


def _site(rng: np.random.Generator, town: int, devices_max: int) -> _Site:
    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(rng.random())

    kind, tflops, memory_gb = int(3 * rng.random()), uniform(10, 100), (8.0, 16.0, 24.0, 48.0)[int(4 * rng.random())]
    if kind == 0:
        size, inside, world = int(uniform(2, 9)), uniform(50, 200), uniform(3, 10)
        return _Site(
            town=town,
            devices=min(size, devices_max),
            down_gbps=world,
            up_gbps=world,
            inside_ms=0.02,
            inside_gbps=inside,
            is_server=True,
            tflops=tflops,
            memory_gb=memory_gb,
        )
    if kind == 1:
        size, inside, world = int(uniform(2, 7)), uniform(1, 10), uniform(1, 3)
        return _Site(
            town=town,
            devices=min(size, devices_max),
            down_gbps=world,
            up_gbps=world,
            inside_ms=0.3,
            inside_gbps=inside,
            tflops=tflops,
            memory_gb=memory_gb,
        )
    down, share_up, last_mile = uniform(0.3, 1), uniform(0.33, 1), uniform(5, 20)
    return _Site(
        town=town,
        devices=1,
        down_gbps=down,
        up_gbps=down * share_up,
        inside_ms=0.0,
        inside_gbps=1.0,
        last_mile_ms=last_mile,
        tflops=tflops,
        memory_gb=memory_gb,
    )


def _between_sites(towns: Floats, sites: list[_Site], rng: np.random.Generator) -> tuple[Floats, Floats]:
    """(one way in ms, Gbit/s), float64 [sites, sites]; towns: [towns, 2], km."""
    place = towns[[site.town for site in sites]]
    span = place[:, None, :] - place[None, :, :]
    distance = np.sqrt((span * span).sum(axis=2))
    luck = np.triu(rng.random(distance.shape))
    luck = luck + np.triu(luck, 1).T
    last_mile = np.array([site.last_mile_ms for site in sites])
    latency = 1.0 + distance / 100.0 * (1.0 + 0.5 * luck) + last_mile[:, None] + last_mile[None, :]
    line = (0.4 + 2.6 / (1.0 + distance / 500.0)) * (1.0 - 0.4 * luck)
    ends = np.minimum.outer(np.array([site.up_gbps for site in sites]), np.array([site.down_gbps for site in sites]))
    return latency, np.minimum(line, ends)
