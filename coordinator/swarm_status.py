"""Builds the status of the swarm for people: the places of peers and the progress of the run. Pure."""

from collections.abc import Collection, Sequence

from shoal.coordinator.allocate.reachability import Pair
from shoal.coordinator.diagnosis import out_of_reach, risks, unsound, waits_for
from shoal.coordinator.era import CheckpointCatalog
from shoal.coordinator.experts.expert_groups import ExpertPlaces
from shoal.coordinator.ledger import Ledger
from shoal.coordinator.roster import Roster
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Comparison, ExpertStatus, PlanNote, SwarmStatus
from shoal.protocol.plan import Plan
from shoal.protocol.spec import RunSpec

STATUS_PEERS_MAX = 256
"""A peer's line is about 200 bytes; more would not fit in one message."""
STATUS_EXPERTS_MAX = 1024
"""An expert's line is about 50 bytes with three holders."""


def swarm_status(
    run: str,
    spec: RunSpec,
    live: Plan,
    roster: Roster,
    ledger: Ledger,
    experts: ExpertPlaces,
    plans: tuple[PlanNote, ...],
    comparison: Comparison | None,
    unreachable: Collection[Pair],
    catalog: CheckpointCatalog,
    refusals: tuple[str, ...],
    *,
    owner: PeerID,
    elapsed_s: float,
    now_s: float,
) -> SwarmStatus:
    """Build the message.
    Args: disks: the snapshots to which the run may roll back. refusals: recently refused plans, in sentences.
    elapsed_s: since the run began.
    """
    ids = sorted({*live.members, *roster.alive(now_s)}, key=lambda peer: (_stage_key(live, peer), peer))
    shares = _shares(live)
    told = (roster.status(peer, live, now_s, share=shares.get(peer, 0.0)) for peer in ids[:STATUS_PEERS_MAX])
    peers = tuple(peer for peer in told if peer is not None)
    tokens_per_s, stands_s = ledger.pace.tokens_per_s(now_s), ledger.pace.stands_s(now_s)
    tokens_left = (spec.training.steps - ledger.step) * spec.tokens_per_step
    return SwarmStatus(
        run=run,
        name=spec.name,
        coordinator=live.coordinator,
        term=live.term,
        plan_sequence=live.sequence,
        plan_reason=live.reason,
        step=ledger.step,
        steps=spec.training.steps,
        tokens_per_s=tokens_per_s,
        loss=ledger.loss,
        validation_loss=ledger.validation_loss,
        validation_step=ledger.validation_step,
        staleness_steps_mean=ledger.staleness_mean,
        stages=tuple((stage.first_layer, stage.last_layer) for stage in live.stages),
        peers=peers,
        era=ledger.era,
        rollbacks=live.rollbacks,
        elapsed_s=elapsed_s,
        plans=plans,
        experts=_experts(live, roster, experts, [peer.peer for peer in peers]),
        left_s=tokens_left / tokens_per_s if tokens_per_s > 0.0 and not stands_s else None,
        stands_s=stands_s,
        waits_for="" if tokens_left <= 0 else waits_for(live, roster, owner, now_s),
        risks=(
            *risks(live, roster, catalog, spec.model, step=ledger.version_max, now_s=now_s),
            *out_of_reach(unreachable, roster),
            *unsound(live, roster),
            *refusals,
        ),
        comparison=comparison,
        formats=live.formats,
    )


def status_before_the_plan(run: str, spec: RunSpec, owner: PeerID, waits_for: str) -> SwarmStatus:
    """Build the status of a run without a plan: no peer holds a stage, and `waits_for` is what the first plan needs."""
    return SwarmStatus(
        run=run,
        name=spec.name,
        coordinator=owner,
        term=0,
        plan_sequence=0,
        plan_reason="",
        step=0,
        steps=spec.training.steps,
        tokens_per_s=0.0,
        loss=None,
        validation_loss=None,
        staleness_steps_mean=0.0,
        stages=(),
        peers=(),
        elapsed_s=0.0,
        waits_for=waits_for,
    )


def _experts(live: Plan, roster: Roster, experts: ExpertPlaces, listed: Sequence[PeerID]) -> tuple[ExpertStatus, ...]:
    """Return the experts and their holders. Args: listed: the peers that the status names."""
    positions = {peer: position for position, peer in enumerate(listed)}
    loads = [experts.load_shares(stage) for stage in range(len(live.stages))] if live.experts else []
    found = []
    for entry in live.experts[:STATUS_EXPERTS_MAX]:
        group = live.expert_group(entry.stage, entry.expert)
        members = [peer for peer in entry.peers if peer in positions]
        holders = [peer for peer in members if roster.holds(peer, group, live.era)]
        found.append(
            ExpertStatus(
                stage=entry.stage,
                expert=entry.expert,
                load=round(loads[entry.stage][entry.expert], 4),
                holders=tuple(positions[peer] for peer in holders),
                coming=tuple(positions[peer] for peer in members if peer not in holders),
            )
        )
    return tuple(found)


def _shares(plan: Plan) -> dict[PeerID, float]:
    totals = [sum(member.share for member in stage.members) for stage in plan.stages]
    return {
        member.peer: member.share / total
        for stage, total in zip(plan.stages, totals, strict=True)
        for member in stage.members
    }


def _stage_key(plan: Plan, peer: PeerID) -> int:
    """Return the peer's stage; standbys come last."""
    stage = plan.stage_of(peer)
    return len(plan.stages) if stage is None else stage
