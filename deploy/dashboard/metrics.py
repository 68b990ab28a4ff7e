"""Formats a view of the run for Prometheus. Pure.

Counters count the work of this process. Gauges of the whole run come from the coordinator and are as old as
`shoal_status_age_seconds` says. A metric without a value is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from shoal.deploy.base.words import short
from shoal.deploy.dashboard.view import PeerState, View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TRAIN: Sequence[PeerState] = ("training", "light")

Samples = float | None | Sequence[tuple[Mapping[str, str], float | None]]
"""The samples of one metric: a single value without labels, or (labels, value) pairs. None: the value is unknown."""


def render_metrics(view: View) -> str:
    """Return all metric families: the run's, then stages, experts, peers and this peer's contribution."""
    lines = []
    for name, about, samples in _families(view):
        each = samples if isinstance(samples, Sequence) else [({}, samples)]
        known = [(labels, float(value)) for labels, value in each if value is not None]
        if known:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP {name} {about}\n", f"# TYPE {name} {kind}\n"]
        for labels, value in known:
            inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
            lines.append(f"{name}{{{inside}}} {value:.10g}\n" if inside else f"{name} {value:.10g}\n")
    return "".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _families(view: View) -> Iterator[tuple[str, str, Samples]]:
    """Yield (name, description, samples) of each metric family."""
    yield "shoal_run_info", "The run that this peer takes part in.", [({"run": view.run, "name": view.name}, 1.0)]
    yield "shoal_step", "Steps that every stage has committed.", view.step
    yield "shoal_steps", "Steps of the whole run.", view.steps
    yield "shoal_loss", "Training loss of the newest step, nats a token.", view.loss
    yield "shoal_validation_loss", "The newest validation's loss, nats a token.", view.validation_loss
    rate = "Tokens/s of the run over the last minute, standstills included."
    yield "shoal_tokens_per_second", rate, view.tokens_per_s
    yield "shoal_foreseen_tokens_per_second", "Predicted tokens/s of the live layout.", view.foreseen_tokens_per_s
    median = "Median tokens/s of the live layout, standstills left out."
    yield "shoal_seen_tokens_per_second", median, view.seen_tokens_per_s
    yield "shoal_staleness_steps", "Mean staleness of the newest step's gradients.", view.staleness_steps_mean
    yield "shoal_era", "Number of restarts of the run, from a snapshot or with other stages.", view.era
    yield "shoal_rollbacks", "Number of returns to a snapshot.", view.rollbacks
    yield "shoal_term", "The coordinator's term.", view.term
    yield "shoal_plan_sequence", "Plans of the run so far.", view.sequence
    yield "shoal_elapsed_seconds", "Seconds since the run's first plan.", view.elapsed_s
    yield "shoal_left_seconds", "Seconds until the last step, at that rate.", view.left_s
    yield "shoal_status_age_seconds", "Seconds since the coordinator's last message.", view.status_age_s

    states = [peer.state for peer in view.peers]
    counts = [({"state": state}, states.count(state)) for state in get_args(PeerState)]
    yield "shoal_peers", "Peers by state.", counts
    training = [peer.stage for peer in view.peers if peer.state in _TRAIN]
    replicas = [({"stage": str(stage)}, training.count(stage)) for stage in range(len(view.stages))]
    yield "shoal_stage_replicas", "Peers that train a stage.", replicas
    flows = [({"stage": str(stage)}, rate) for stage, rate in enumerate(view.flows)]
    yield "shoal_stage_flow_bytes_per_second", "Activations to the next stage and gradients back.", flows

    experts = [({"stage": str(expert.stage), "expert": str(expert.expert)}, expert) for expert in view.experts]
    copies = [(labels, expert.replicas) for labels, expert in experts]
    yield "shoal_expert_replicas", "Peers that hold an expert of a stage.", copies
    loads = [(labels, expert.load) for labels, expert in experts]
    yield "shoal_expert_load", "Tokens of an expert, relative to an even share.", loads

    peers = [
        ({"peer": short(peer.id), "name": peer.name, "stage": "" if peer.stage is None else str(peer.stage)}, peer)
        for peer in view.peers
    ]
    versions = [(labels, peer.version if peer.version >= 0 else None) for labels, peer in peers]
    yield "shoal_peer_version", "Steps in a peer's state.", versions
    shares = [(labels, peer.share) for labels, peer in peers]
    yield "shoal_peer_share", "A peer's share of its stage's traffic, by the plan.", shares
    forwards = [(labels, peer.forward_s or None) for labels, peer in peers]
    yield "shoal_peer_forward_seconds", "Median time of a forward.", forwards
    speeds = [(labels, peer.flop_per_s or None) for labels, peer in peers]
    yield "shoal_peer_flops", "A peer's FLOP/s, measured by its probe.", speeds
    silences = [(labels, peer.seen_s_ago) for labels, peer in peers]
    yield "shoal_peer_seen_seconds", "Seconds since a peer's last heartbeat.", silences

    mine = view.mine
    if mine is None:
        return
    yield "shoal_self_busy_ratio", "Share of the time in which the device computes.", mine.busy
    yield "shoal_self_sending_ratio", "Share of the time in which something is being sent.", mine.sending
    yield "shoal_self_flops", "FLOP/s of this peer.", mine.flop_per_s
    yield "shoal_self_tokens_per_second", "Tokens through this peer's layers.", mine.tokens_per_s
    yield "shoal_self_work_ratio", "This peer's share of the run's work.", mine.work_share
    yield "shoal_self_memory_bytes", "Resident memory of this process.", mine.memory_bytes
    yield "shoal_self_uptime_seconds", "Seconds since this process takes part.", mine.uptime_s
    yield "shoal_self_paused", "1 while this peer is paused.", mine.limits is not None and mine.limits.paused
    yield "shoal_self_limited", "What limits this peer's contribution.", [({"by": mine.limited_by.kind}, 1.0)]
    yield "shoal_self_flop_total", "FLOP computed by this peer.", mine.flop_total
    yield "shoal_self_microbatches_total", "Microbatches computed.", mine.microbatches_total
    yield "shoal_self_tokens_total", "Tokens through this peer's layers.", mine.tokens_total
    yield "shoal_self_sent_bytes_total", "Bytes of frames sent.", mine.sent_bytes_total
    yield "shoal_self_received_bytes_total", "Bytes of frames received.", mine.received_bytes_total
