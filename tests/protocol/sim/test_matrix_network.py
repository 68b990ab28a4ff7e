import statistics

import numpy as np

from shoal.protocol.sim.network import MatrixNetwork
from shoal.protocol.topology import make_topology


def test_it_is_the_network_that_its_matrices_make() -> None:
    rng = np.random.default_rng(0)
    latency_s, rate = rng.uniform(0.01, 0.1, (5, 5)), rng.uniform(1e6, 1e7, (5, 5))
    compact = MatrixNetwork(make_topology(latency_s, rate))
    for i in range(5):
        for j in range(5):
            if i != j:
                assert compact.link(i, j).latency_s == latency_s[i, j]
                assert compact.link(i, j).rate_bytes_per_s == rate[i, j]
    assert compact.num_places == 5
    assert compact.typical_latency_s == statistics.median_low(latency_s[~np.eye(5, dtype=bool)].tolist())


def test_links_of_one_kind_are_one_object() -> None:
    network = MatrixNetwork(make_topology(np.full((4, 4), 0.1), np.full((4, 4), 1e6)))
    assert network.link(0, 1) is network.link(2, 3)


def test_where_there_is_no_path_nothing_arrives_while_a_run_lasts() -> None:
    rate = np.full((3, 3), 1e6)
    rate[0, 1] = 0.0
    network = MatrixNetwork(make_topology(np.full((3, 3), 0.1), rate))
    assert 1e5 / network.link(0, 1).rate_bytes_per_s > 30 * 86_400
    assert network.link(1, 0).rate_bytes_per_s == 1e6
