"""Draws how many tokens of a microbatch each expert gets. The draw is a pure function of the run's seed, so a repeated
microbatch sends the same numbers."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from shoal.deploy.simulate.extents import phantom
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.protocol.errors import LocalError
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec


class SimulatedRouting:
    """Draws the number of rows (tokens) that each expert gets.

    Args: loads: [E], the relative loads of the experts, the same in every layer; None: all equal.
    Raises: LocalError: the loads do not match the run's experts.
    """

    def __init__(self, spec: RunSpec, loads: Sequence[float] | None = None) -> None:
        model = spec.model
        loads = [1.0] * model.num_experts if loads is None else list(loads)
        if len(loads) != model.num_experts or min(loads) < 0.0 or not 0.0 < sum(loads) < float("inf"):
            raise LocalError(f"the loads of {model.num_experts} experts are not {len(loads)} numbers of at least 0")
        self._tokens = spec.training.microbatch_size * model.context
        rows = self._tokens * model.experts_per_token
        self._share_E = np.array(loads) / sum(loads)
        self._rows = rows
        self._seed = spec.seed
        self.tokens: Payload = phantom(rows * TokenWire(spec).row_bytes)
        """A phantom as large as all rows (tokens) that one layer sends to its experts for one microbatch."""
        self.counts_of = lru_cache(maxsize=4096)(self._drawn)

    def _drawn(self, microbatch: Microbatch, layer: int) -> tuple[int, ...]:
        """Draw an expert for each row (a token is sent as several rows), and return the number of rows of each expert.
        If an expert gets more rows than there are tokens, the rows beyond go to the next less loaded expert."""
        # The first number separates these draws from others of the run's seed.
        rng = np.random.default_rng((0x5EED, self._seed, microbatch.step, microbatch.index % (1 << 32), layer))
        count_E = rng.multinomial(self._rows, self._share_E)
        beyond = 0
        for expert in np.argsort(-self._share_E, kind="stable"):
            wanted = int(count_E[expert]) + beyond
            count_E[expert] = min(wanted, self._tokens)
            beyond = wanted - int(count_E[expert])
        return tuple(int(count) for count in count_E)
