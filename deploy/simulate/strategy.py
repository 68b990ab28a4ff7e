"""Defines the strategies of a simulation. They differ in layout, staleness, wire formats, subspace and churn."""

from typing import Literal

import msgspec

from shoal.deploy.planning.layouts import LayoutName
from shoal.deploy.simulate.regions import Section, require
from shoal.protocol.spec import RunSpec, WireSpec

Layout = Literal[LayoutName, "live"]
"""The name of a layout; `live`: the coordinators of the simulated swarm choose it, anew at every change."""


class Strategy(Section, frozen=True):
    """One way to run a scenario, and one row of the table."""

    name: str
    layout: Layout
    s_max: int | None = None
    """The largest staleness in steps; None: the scenario's."""
    wire: WireSpec | None = None
    """The wire formats; None: the scenario's."""
    subspace: int | None = None
    """How many numbers stages send each other for a token (`ModelSpec`); 0: no subspace; None: the scenario's."""
    stages: int | None = None
    """The number of stages; None: the scenario's, or else the layout's own choice or default."""
    churn: bool = True
    """False: no device comes or goes."""
    experts: bool = True
    """False: no expert is placed; each member of a stage holds all experts of its layers."""

    def __post_init__(self) -> None:
        require(0 < len(self.name) <= 40, "a strategy's name must have 1 to 40 characters")
        require(self.s_max is None or 0 <= self.s_max <= 8, f"s_max must be in [0, 8], is {self.s_max}")
        require(self.subspace is None or self.subspace >= 0, f"subspace must be 0 or more, is {self.subspace}")
        require(self.stages is None or self.stages > 0, f"stages must be positive, is {self.stages}")

    def applied_to(self, spec: RunSpec) -> RunSpec:
        """Return this strategy's variant of a scenario's run. Raises: ValueError: the variant is invalid."""
        model, training, swarm = spec.model, spec.training, spec.swarm
        if self.subspace is not None:
            model = msgspec.structs.replace(model, subspace=self.subspace)
        if self.s_max is not None:
            training = msgspec.structs.replace(training, s_max=self.s_max)
        if not self.experts:
            swarm = msgspec.structs.replace(swarm, expert_slots=0)
        return msgspec.structs.replace(spec, model=model, training=training, wire=self.wire or spec.wire, swarm=swarm)


KNOWN: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy(name="ours", layout="ours"),
        Strategy(name="ours-sync", layout="ours", s_max=0),
        Strategy(name="live", layout="live"),
        Strategy(name="peace", layout="live", churn=False),
        Strategy(name="at-once", layout="at-once"),
        Strategy(name="greedy", layout="greedy"),
        Strategy(name="mod", layout="mod", s_max=0),
        Strategy(name="random", layout="random", s_max=0),
        Strategy(name="given", layout="given", s_max=0),
        Strategy(name="dtfm", layout="dtfm", s_max=0),
    )
}
"""Name that `--strategies` takes -> strategy. `given` is a synchronous pipeline of the devices in the file's order."""
DEFAULT = ("ours", "live", "ours-sync", "random", "given")
"""The default strategies: our planned layout, unchanged; layouts by the swarm's own coordinators; others to compare."""
CHURN_DEFAULT = ("live", "peace")
"""The default strategies with churn. A layout that never changes would stop when a stage has lost all members."""
