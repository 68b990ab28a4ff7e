"""The services that a peer gives to its memberships in groups: ports, the run, and shared objects."""

from dataclasses import dataclass

from shoal.peer.base.failures import Failures
from shoal.peer.base.plans import Plans
from shoal.peer.compute.arithmetic import Arithmetic
from shoal.peer.presence.life import Life
from shoal.peer.presence.neighbours import Neighbours
from shoal.peer.presence.own_word import OwnWord
from shoal.peer.presence.parts import Parts
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Reports
from shoal.peer.replica.flow import Traffic
from shoal.peer.services.expert_server import ExpertServer
from shoal.peer.services.layers import Layers
from shoal.peer.services.shortages import Shortages
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.ports import Clock, Compute
from shoal.protocol.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHere:
    """The run, and how this peer computes it."""

    spec: RunSpec
    arithmetic: Arithmetic
    """The peer's computations on tensors. They include the run's text if the peer has it, which stage 0 needs."""
    traffic: Traffic
    """The policy for sending microbatches to the next stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The services that all memberships of a peer share."""

    ports: Ports
    run: RunHere
    plans: Plans
    life: Life
    parts: Parts
    own: OwnWord
    neighbours: Neighbours
    reports: Reports
    layers: Layers
    experts: ExpertServer
    shortages: Shortages
    failures: Failures

    @property
    def endpoint(self) -> Endpoint:
        return self.ports.endpoint

    @property
    def compute(self) -> Compute:
        return self.ports.compute

    @property
    def clock(self) -> Clock:
        return self.ports.clock

    @property
    def spec(self) -> RunSpec:
        return self.run.spec

    @property
    def arithmetic(self) -> Arithmetic:
        return self.run.arithmetic
