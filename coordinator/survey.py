"""Knows the measurements and former places of peers, and makes the snapshots from which layouts are made. Pure."""

from collections import OrderedDict
from dataclasses import replace

from shoal.coordinator.allocate.interface import MeasuredPeer, SwarmSnapshot
from shoal.coordinator.allocate.measured import LinkBook, SpeedBook
from shoal.coordinator.allocate.reachability import Reachability
from shoal.coordinator.cost.workload import FormatBytes, Workload, layer_costs
from shoal.coordinator.era import CheckpointCatalog, stages_on
from shoal.coordinator.link_survey import LinkSurvey
from shoal.protocol.identity import PeerID
from shoal.protocol.layers import held_keys
from shoal.protocol.messages import Heartbeat
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec

FORMER_PLACES_MAX = 4096
"""Number of peers of which we remember the last place."""


class Survey:
    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._layer_costs = layer_costs(spec.model)
        self.workload = Workload.of(spec)
        """The demands of a step with the narrowest formats that the run allows."""
        self.takes = FormatBytes.of(spec)
        """Bytes of activations and sums in each format that a plan of this run may choose."""
        told = layer_costs(spec.model, with_experts=not spec.swarm.expert_slots)
        self._told_flop = tuple(self.workload.tokens_per_microbatch * flop for flop in told)
        """[L], the part of a forward that peers time (`Heartbeat.forward_s`); it contains no placed experts."""
        self._links, self._speeds = LinkBook(), SpeedBook()
        self.reach = Reachability(spec.swarm.heartbeat_s)
        self.links = LinkSurvey(self._links, spec.swarm.heartbeat_s, self.reach)
        self._plan: Plan | None = None
        self._former: OrderedDict[PeerID, int] = OrderedDict()

    def obey(self, plan: Plan) -> None:
        """Record a live plan and the stage of each peer, to which it may return later."""
        self._plan = plan
        for index, stage in enumerate(plan.stages):
            for peer in stage.peers:
                self._former[peer] = index
                self._former.move_to_end(peer)
        while len(self._former) > FORMER_PLACES_MAX:
            self._former.popitem(last=False)

    def begin_term(self, plan: Plan) -> None:
        """Begin a term of ours: forget the peers outside the plan."""
        self._links.keep(plan.members)
        self.reach.keep(plan.members)
        self.links.forget()
        self._speeds.keep(plan.members)

    def hear(self, peer: PeerID, heartbeat: Heartbeat) -> None:
        """Record the measurements in a heartbeat."""
        self._links.note(peer, heartbeat.links)
        self.links.hear(peer, heartbeat.advert.machine)
        plan, stage, w = self._plan, heartbeat.stage, self.workload
        if plan is None or heartbeat.plan_sequence != plan.sequence or stage is None or heartbeat.forward_s <= 0.0:
            return
        if 0 <= stage < len(plan.stages):
            first, last = plan.stages[stage].first_layer, plan.stages[stage].last_layer
            # The last stage runs forward and backward in one job.
            times = w.loss_per_forward if stage == len(plan.stages) - 1 else 1.0
            self._speeds.note(peer, (first, last), times * sum(self._told_flop[first:last]) / heartbeat.forward_s)

    def shortage(self, peers: tuple[MeasuredPeer, ...]) -> str:
        """Say how much memory the run lacks; empty: the peers together have the minimum for the model."""
        w = self.workload
        needed_gb = (w.resident_bytes(0, w.num_layers, members=1) + sum(w.layer_held_bytes)) / 1e9
        here_gb = sum(peer.memory_bytes for peer in peers if not peer.draining) / 1e9
        if here_gb >= needed_gb:
            return ""
        here = "the one peer has" if len(peers) == 1 else f"the {len(peers)} peers have"
        return (
            f"waiting for peers with {needed_gb - here_gb:.1f} GB of memory in all: the model takes {needed_gb:.1f} GB "
            f"while it trains, and {here} {here_gb:.1f} GB"
        )

    def snapshot(
        self, peers: tuple[MeasuredPeer, ...], previous: Plan | None, catalog: CheckpointCatalog, *, knows_network: bool
    ) -> SwarmSnapshot:
        """Collect all inputs of a layout. Args: knows_network: include the links, which takes a while for many
        peers."""
        model = self._spec.model
        whole = catalog.newest_whole(held_keys(model, placed=self._spec.swarm.expert_slots > 0))

        def homes(peer: MeasuredPeer) -> tuple[int, ...]:
            on_disk = stages_on(catalog, peer.peer, whole, previous, model) if whole and previous else ()
            stages = (peer.synced_stage, self._former.get(peer.peer), *on_disk)
            return tuple(dict.fromkeys(stage for stage in stages if stage is not None))

        seen = self._links.seen_by_others()
        speeds = self._speeds.speeds({peer.peer: peer.flop_per_s for peer in peers}, seen=seen)
        w = self.workload
        in_flight_bytes = ((w.s_max + 1) * w.microbatches + 1) * sum(w.layer_held_bytes)
        whole_bytes = int(w.resident_bytes(0, w.num_layers, members=1) + in_flight_bytes)
        uploads = self._links.uploads({peer.peer: peer.upload_bytes_per_s for peer in peers})
        return SwarmSnapshot(
            peers=tuple(
                replace(
                    p,
                    homes=homes(p),
                    flop_per_s=speeds[p.peer],
                    upload_bytes_per_s=uploads[p.peer],
                    # more than the whole model is not useful, whatever it claims
                    memory_bytes=min(p.memory_bytes, whole_bytes),
                )
                for p in peers
            ),
            layer_costs=self._layer_costs,
            num_stages=self._spec.swarm.stages_for(sum(not peer.draining for peer in peers)),
            workload=self.workload,
            network=self._links.network([peer.peer for peer in peers]) if knows_network else None,
        )
