"""Formats a view of the run for Prometheus. Pure.

Counters are of this process; gauges of the whole run come from the coordinator and are as old as
`shoal_status_age_seconds` says. A metric without a value is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from shoal.deploy.dashboard.view import PeerState, View

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TRAIN: Sequence[PeerState] = ("training", "light")

Sample = tuple[Mapping[str, str], float]


def render_metrics(view: View) -> str:
    """Return all metric families: the run's, then stages, experts, peers and this peer's contribution."""
    return "".join(line for part in (_run, _stages, _experts, _peers, _mine) for line in part(view))


def _run(view: View) -> Iterator[str]:
    labels = {"run": view.run, "name": view.name}
    yield from _family("shoal_run_info", "gauge", "The run that this peer takes part in.", [(labels, 1.0)])
    yield from _plain(
        "gauge",
        ("shoal_step", "Steps that every stage has committed.", view.step),
        ("shoal_steps", "Steps of the whole run.", view.steps),
        ("shoal_loss", "Training loss of the newest step, nats a token.", view.loss),
        ("shoal_validation_loss", "The newest validation's loss, nats a token.", view.validation_loss),
        (
            "shoal_tokens_per_second",
            "Tokens/s of the run over the last minute, standstills included.",
            view.tokens_per_s,
        ),
        ("shoal_foreseen_tokens_per_second", "Predicted tokens/s of the live layout.", view.foreseen_tokens_per_s),
        (
            "shoal_seen_tokens_per_second",
            "Median tokens/s of the live layout, standstills left out.",
            view.seen_tokens_per_s,
        ),
        ("shoal_staleness_steps", "Mean staleness of the newest step's gradients.", view.staleness_steps_mean),
        ("shoal_era", "Number of restarts of the run, from a snapshot or with other stages.", view.era),
        ("shoal_rollbacks", "Number of returns to a snapshot.", view.rollbacks),
        ("shoal_term", "The coordinator's term.", view.term),
        ("shoal_plan_sequence", "Plans of the run so far.", view.sequence),
        ("shoal_elapsed_seconds", "Seconds since the run's first plan.", view.elapsed_s),
        ("shoal_left_seconds", "Seconds until the last step, at that rate.", view.left_s),
        ("shoal_status_age_seconds", "Seconds since the coordinator's last message.", view.status_age_s),
    )


def _stages(view: View) -> Iterator[str]:
    states: Sequence[PeerState] = get_args(PeerState)
    counts = {state: float(sum(peer.state == state for peer in view.peers)) for state in states}
    yield from _family("shoal_peers", "gauge", "Peers by state.", [({"state": s}, n) for s, n in counts.items()])
    replicas = [
        ({"stage": str(stage)}, float(sum(peer.stage == stage and peer.state in _TRAIN for peer in view.peers)))
        for stage in range(len(view.stages))
    ]
    yield from _family("shoal_stage_replicas", "gauge", "Peers that train a stage.", replicas)
    flows = [({"stage": str(stage)}, rate) for stage, rate in enumerate(view.flows)]
    yield from _family(
        "shoal_stage_flow_bytes_per_second", "gauge", "Activations to the next stage and gradients back.", flows
    )


def _experts(view: View) -> Iterator[str]:
    labelled = [({"stage": str(expert.stage), "expert": str(expert.expert)}, expert) for expert in view.experts]
    copies = [(labels, float(expert.replicas)) for labels, expert in labelled]
    yield from _family("shoal_expert_replicas", "gauge", "Peers that hold an expert of a stage.", copies)
    loads = [(labels, expert.load) for labels, expert in labelled if expert.load is not None]
    yield from _family("shoal_expert_load", "gauge", "Tokens of an expert, relative to an even share.", loads)


def _peers(view: View) -> Iterator[str]:
    peers = view.peers
    labels = [
        {"peer": peer.id[-8:], "name": peer.name, "stage": "" if peer.stage is None else str(peer.stage)}
        for peer in peers
    ]
    families: Sequence[tuple[str, str, Sequence[float | None]]] = (
        ("shoal_peer_version", "Steps in a peer's state.", [p.version if p.version >= 0 else None for p in peers]),
        ("shoal_peer_share", "A peer's share of its stage's traffic, by the plan.", [p.share for p in peers]),
        ("shoal_peer_forward_seconds", "Median time of a forward.", [p.forward_s or None for p in peers]),
        ("shoal_peer_flops", "A peer's FLOP/s, measured by its probe.", [p.flop_per_s or None for p in peers]),
        ("shoal_peer_seen_seconds", "Seconds since a peer's last heartbeat.", [p.seen_s_ago for p in peers]),
    )
    for name, about, values in families:
        samples = [(who, value) for who, value in zip(labels, values, strict=True) if value is not None]
        yield from _family(name, "gauge", about, samples)


def _mine(view: View) -> Iterator[str]:
    mine = view.mine
    if mine is None:
        return
    yield from _plain(
        "gauge",
        ("shoal_self_busy_ratio", "Share of the time in which the device computes.", mine.busy),
        ("shoal_self_sending_ratio", "Share of the time in which something is being sent.", mine.sending),
        ("shoal_self_flops", "FLOP/s of this peer.", mine.flop_per_s),
        ("shoal_self_tokens_per_second", "Tokens through this peer's layers.", mine.tokens_per_s),
        ("shoal_self_work_ratio", "This peer's share of the run's work.", mine.work_share),
        ("shoal_self_memory_bytes", "Resident memory of this process.", mine.memory_bytes),
        ("shoal_self_uptime_seconds", "Seconds since this process takes part.", mine.uptime_s),
        ("shoal_self_paused", "1 while this peer is paused.", mine.limits is not None and mine.limits.paused),
    )
    limiting = [({"by": mine.limited_by.kind}, 1.0)]
    yield from _family("shoal_self_limited", "gauge", "What limits this peer's contribution.", limiting)
    yield from _plain(
        "counter",
        ("shoal_self_flop_total", "FLOP computed by this peer.", mine.flop_total),
        ("shoal_self_microbatches_total", "Microbatches computed.", mine.microbatches_total),
        ("shoal_self_tokens_total", "Tokens through this peer's layers.", mine.tokens_total),
        ("shoal_self_sent_bytes_total", "Bytes of frames sent.", mine.sent_bytes_total),
        ("shoal_self_received_bytes_total", "Bytes of frames received.", mine.received_bytes_total),
    )


def _plain(kind: Literal["gauge", "counter"], *metrics: tuple[str, str, float | None]) -> Iterator[str]:
    """Format (name, about, value) each, without labels."""
    for name, about, value in metrics:
        yield from _family(name, kind, about, [] if value is None else [({}, float(value))])


def _family(name: str, kind: Literal["gauge", "counter"], about: str, samples: Sequence[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value:.10g}\n" if inside else f"{name} {value:.10g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
