"""Makes the parts of one peer. Each gets finished ones as arguments, so the order below is the order of dependence:

ports -> plans -> life -> parts -> own word -> neighbours -> layers -> seats, pausing, departure -> `PeerDriver`
"""

from dataclasses import dataclass

from shoal.peer.base.failures import Failures
from shoal.peer.base.plans import Plans
from shoal.peer.base.tasks import Tasks
from shoal.peer.inference.service import InferenceService
from shoal.peer.links.probing import LinkProbing
from shoal.peer.membership.departure import Departure
from shoal.peer.membership.expert_seats import ExpertSeats
from shoal.peer.membership.pausing import Pausing
from shoal.peer.membership.stage_seat import StageSeat
from shoal.peer.presence.life import Life
from shoal.peer.presence.neighbours import Neighbours
from shoal.peer.presence.own_word import Claims, OwnWord
from shoal.peer.presence.parts import Parts
from shoal.peer.presence.ports import Ports
from shoal.peer.presence.reports import Reports, Watcher
from shoal.peer.services.expert_server import ExpertServer
from shoal.peer.services.layers import Layers
from shoal.peer.services.services import RunHere, Services
from shoal.peer.services.shortages import Shortages


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """All parts of one peer that its driver uses."""

    services: Services
    links: LinkProbing
    inference: InferenceService
    pausing: Pausing
    departure: Departure
    experts: ExpertSeats
    stage: StageSeat
    tasks: Tasks
    """They end by themselves when the peer closes."""


def make_peer(ports: Ports, run: RunHere, claims: Claims, watcher: Watcher) -> Root:
    """Make the parts of a peer of `run`. Nothing is sent before a plan is obeyed."""
    endpoint, compute, clock, spec, arithmetic = ports.endpoint, ports.compute, ports.clock, run.spec, run.arithmetic
    failures = Failures()
    tasks = Tasks(failures.add)
    plans, life, parts = Plans(clock), Life(endpoint), Parts()
    links = LinkProbing(endpoint, clock, ports.meter, arithmetic.vectors)
    own = OwnWord(endpoint, plans, life, parts, links, claims, has_text=arithmetic.has_text)
    neighbours = Neighbours(endpoint, clock, plans, parts, own, silence_s=3.0 * spec.swarm.heartbeat_s)
    reports = Reports(endpoint, clock, plans, watcher)
    layers = Layers(ports, spec, arithmetic, plans, life, parts, reports, failures, tasks)
    inference = InferenceService(spec, ports, plans, parts, failures)
    services = Services(
        ports=ports,
        run=run,
        plans=plans,
        life=life,
        parts=parts,
        own=own,
        neighbours=neighbours,
        reports=reports,
        layers=layers,
        experts=ExpertServer(arithmetic.tokens, endpoint=endpoint, compute=compute, spec=spec, tasks=tasks),
        shortages=Shortages(spec, life, parts, own, neighbours, reports, spare=inference),
        failures=failures,
    )
    experts = ExpertSeats(services)
    return Root(
        services=services,
        links=links,
        inference=inference,
        pausing=Pausing(clock, life, parts, neighbours),
        departure=Departure(services),
        experts=experts,
        stage=StageSeat(services, experts),
        tasks=tasks,
    )
