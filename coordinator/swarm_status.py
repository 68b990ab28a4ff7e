"""Builds the swarm's status for people: places, progress, why the run cannot continue, which state it may lose. Pure.

Only this module makes these sentences; `SwarmStatus` carries them, so every terminal, page and script shows the same.
"""

from collections.abc import Collection, Sequence

from shoal.coordinator.allocate.measured import Pair
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.era import CheckpointCatalog, holders
from shoal.coordinator.experts.groups import ExpertPlaces
from shoal.coordinator.membership import NAMED_MAX
from shoal.coordinator.roster import SILENT_HEARTBEATS, Roster, span
from shoal.protocol.identity import PeerID
from shoal.protocol.invite import is_global
from shoal.protocol.layers import group_keys
from shoal.protocol.messages import ExpertStatus, SwarmStatus
from shoal.protocol.plan import Plan, is_quorum
from shoal.protocol.spec import ModelSpec, RunSpec

STATUS_PEERS_MAX = 256
"""The most peers in a status: each takes about 200 bytes, and the status must fit in one message."""
STATUS_EXPERTS_MAX = 1024
"""The most experts in a status: each takes about 50 bytes with three holders."""


def swarm_status(view: ClusterView, live: Plan, now_s: float, *, owner: PeerID) -> SwarmStatus:
    """Build the message about the swarm as its coordinator sees it."""
    spec, roster, ledger = view.spec, view.roster, view.ledger
    stages = {peer: index for index, stage in enumerate(live.stages) for peer in stage.peers}
    ids = sorted({*live.members, *roster.alive(now_s)}, key=lambda peer: (stages.get(peer, len(live.stages)), peer))
    shares = _shares(live)
    told = (roster.status(peer, live, now_s, share=shares.get(peer, 0.0)) for peer in ids[:STATUS_PEERS_MAX])
    peers = tuple(peer for peer in told if peer is not None)
    tokens_per_s, stands_s = ledger.pace.tokens_per_s(now_s), ledger.pace.stands_s(now_s)
    tokens_left = (spec.training.steps - ledger.step) * spec.tokens_per_step
    return SwarmStatus(
        run=view.run,
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
        elapsed_s=view.elapsed_s(now_s),
        plans=view.notes.tell(now_s),
        experts=_experts(live, roster, view.experts, [peer.peer for peer in peers]),
        left_s=tokens_left / tokens_per_s if tokens_per_s > 0.0 and not stands_s else None,
        stands_s=stands_s,
        waits_for="" if tokens_left <= 0 else waits_for(live, roster, owner, now_s),
        risks=(
            *risks(live, roster, view.catalog(now_s), spec.model, step=ledger.version_max, now_s=now_s),
            *out_of_reach(view.links.pairs(now_s, live.members), roster),
            *unsound(live, roster),
            *view.refusals.tell(now_s),
        ),
        comparison=view.calibration.comparison(),
        formats=live.formats,
    )


def status_before_the_plan(run: str, spec: RunSpec, owner: PeerID, waits_for: str) -> SwarmStatus:
    """Build the status of a run without a plan. Args: waits_for: what the first plan needs."""
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


def waits_for(live: Plan, roster: Roster, owner: PeerID, now_s: float) -> str:
    """Say why the run cannot continue: name the first stage without a working member, and the reason. Empty: nothing
    known. An example is "stage 1: its only holder, bob, is paused, for 40 s"."""
    for index, stage in enumerate(live.stages):
        found = [(member.peer, _hindrance(member.peer, live, roster, now_s)) for member in stage.members]
        if not found:
            return f"stage {index}: no peer holds it"
        if all(why for _, why in found):
            return f"stage {index}: {_listed(found, roster)}"
    if not is_quorum({live.coordinator, *roster.alive(now_s)}, live, owner):
        gone = sum(peer != live.coordinator and roster.is_gone(peer, now_s) for peer in live.electors)
        return f"half of the votes: {gone} of {len(live.electors)} do not answer (the host can run `shoal recover`)"
    return ""


def risks(
    live: Plan, roster: Roster, catalog: CheckpointCatalog, model: ModelSpec, *, step: int, now_s: float
) -> tuple[str, ...]:
    """Name the stages with state on one machine only: one holder, and no snapshot on another peer's disk."""
    if step <= 0:
        return ()  # the seed can rebuild it
    by_group = holders(live, roster, catalog, model, not_started=False, now_s=now_s)
    alone = [
        (index, holder)
        for index, held in enumerate(by_group[: len(live.stages)])
        if len(held) == 1
        for holder in held
        if not _has_copy(catalog, holder, frozenset(group_keys(model, live, index)))
    ]
    if len(alone) == 1:
        ((index, holder),) = alone
        return (f"only {roster.name_of(holder)} has the state of stage {index}: no other machine has a copy",)
    if alone:
        stages = _joined([str(index) for index, _ in alone])
        return (f"the states of stages {stages} are on one machine each: no other machine has a copy",)
    return ()


def out_of_reach(pairs: Collection[Pair], roster: Roster) -> tuple[str, ...]:
    """Say which peers cannot reach each other: "bob and eve cannot reach each other (both behind routers)"."""
    if not pairs:
        return ()
    named = sorted(tuple(sorted(roster.name_of(peer) for peer in pair)) for pair in pairs)
    shown = "; ".join(f"{one} and {other}" for one, other in named[:NAMED_MAX])
    more = f"; {len(named) - NAMED_MAX} more pairs" if len(named) > NAMED_MAX else ""
    everybody = {peer for pair in pairs for peer in pair}
    why = " (both behind routers)" if all(_is_behind_router(peer, roster) for peer in everybody) else ""
    return (f"{shown}{more} cannot reach each other{why}",)


def unsound(live: Plan, roster: Roster) -> tuple[str, ...]:
    """Name the members with gradients that other members refuse, in a sentence for each."""
    sentences, accusers = [], roster.accusers()
    placed = [peer for stage in live.stages for peer in stage.peers]
    for accused in live.members:
        said = [roster.name_of(peer) for peer in placed if peer in accusers.get(accused, ())]
        if said:
            say, name = "says" if len(said) == 1 else "say", roster.name_of(accused)
            sentences.append(
                f"{name} sends what is no gradient (NaN, infinity) or restarts without end, {say} {_joined(said)}: it "
                f"counts for nothing (to put {name} out, the host runs `shoal exclude {accused[-8:]}`)"
            )
    return tuple(sentences[:NAMED_MAX])


def _is_behind_router(peer: PeerID, roster: Roster) -> bool:
    advert = roster.advert(peer)
    addresses = advert.addresses if advert is not None else ()
    return bool(addresses) and not any(map(is_global, addresses))


def seconds(span_s: float) -> str:
    """Format a time span as `40 s`, `7 min` or `3 h`."""
    if span_s < 120.0:
        return f"{span_s:.0f} s"
    return f"{span_s / 60.0:.0f} min" if span_s < 7200.0 else f"{span_s / 3600.0:.0f} h"


def _hindrance(peer: PeerID, live: Plan, roster: Roster, now_s: float) -> str:
    """Say why `peer` cannot work for its stage now; empty: `peer` can."""
    presence = roster.at(peer).presence
    beat = presence.heartbeat if presence is not None else None
    if presence is None:
        return "is gone"
    silent_s = presence.silent_s(now_s)
    if presence.said_goodbye:
        return "has left"
    if presence.left or silent_s > SILENT_HEARTBEATS * roster.heartbeat_s:
        return f"does not answer, for {seconds(silent_s)}"
    if beat is None:
        return ""  # a new coordinator hears it shortly
    paused_s = span(beat.paused_s)
    if paused_s is not None:
        return f"is paused, for {seconds(paused_s + silent_s)}"
    if not roster.has_state(peer, live):
        light = roster.light(peer, live)
        return "is downloading its state" if light is None else f"has {light[0]} of {light[1]} layers of its state"
    return "is leaving" if beat.draining else ""


def _listed(found: Sequence[tuple[PeerID, str]], roster: Roster) -> str:
    if len(found) == 1:
        ((peer, why),) = found
        return f"its only holder, {roster.name_of(peer)}, {why}"
    if len(found) > NAMED_MAX:
        return f"none of its {len(found)} holders can work: {roster.name_of(found[0][0])} {found[0][1]}, …"
    return _joined([f"{roster.name_of(peer)} {why}" for peer, why in found])


def _joined(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _has_copy(catalog: CheckpointCatalog, holder: PeerID, keys: frozenset[str]) -> bool:
    return any(
        keys <= frozenset().union(*(held for peer, held in parts.items() if peer != holder))
        for parts in catalog.parts.values()
    )
