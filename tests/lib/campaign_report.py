"""The text of a campaign: a line for each seed, the details of a failure, and a summary."""

import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec
from sim_faults import FaultKind
from trial import CampaignOptions
from witness import RunVerdict


def one_line(verdict: RunVerdict) -> str:
    """Return a line like `seed 17  ok    45 steps, 4 faults, 112 s in 5.1 s`."""
    outcome = "ok  " if verdict.broken is None else "FAIL"
    faults = sum(verdict.injected.values())
    return (
        f"seed {verdict.seed}  {outcome}  {verdict.steps} steps, {faults} faults, "
        f"{verdict.virtual_s:.0f} s in {verdict.wall_s:.1f} s"
    )


def failure(verdict: RunVerdict, options: CampaignOptions) -> str:
    """Return the violated sentence, the faults, the last events, and the command to replay them."""
    lines = [
        f"seed {verdict.seed}: violated: {verdict.broken}",
        f"  {verdict.detail}",
        "faults, in seconds after the first commit:",
        *(f"  {fault}" for fault in verdict.schedule),
        "the last events:",
        *(f"  {line}" for line in verdict.last_events),
        f"trace {verdict.trace_hash}; to replay it:",
        f"  {replay_command(verdict.seed, options)}",
    ]
    return "\n".join(lines)


_OPTIONS = (
    ("--peers", "peers"),
    ("--stages", "stages"),
    ("--steps", "steps"),
    ("--experts", "experts"),
    ("--fault-seconds", "fault_s"),
    ("--mean-gap", "mean_gap_s"),
)


def replay_command(seed: int, options: CampaignOptions) -> str:
    defaults = CampaignOptions()
    words = ["tests/soak/campaign.py --seeds 1", f"--first-seed {seed}"]
    for option, name in _OPTIONS:
        if getattr(options, name) != getattr(defaults, name):
            words.append(f"{option} {getattr(options, name):g}")
    if options.wire is not None:
        words.append(f"--wire {options.wire.activations},{options.wire.activation_gradients},{options.wire.gradients}")
    if options.kinds != defaults.kinds:
        words += [f'--kind "{kind}"' for kind in options.kinds]
    return " ".join(words)


def json_line(verdict: RunVerdict) -> bytes:
    """Return one JSON object on one line."""
    return msgspec.json.encode(verdict) + b"\n"


def summary(verdicts: Sequence[RunVerdict]) -> str:
    """Sum up all seeds; a failed seed counts up to its failure."""
    failed = [verdict for verdict in verdicts if verdict.broken is not None]
    injected: Counter[str] = Counter()
    for verdict in verdicts:
        injected.update(verdict.injected)
    numbers = ", ".join(str(verdict.seed) for verdict in failed)
    microbatches = sum(verdict.microbatches for verdict in verdicts)
    duplicates = sum(verdict.duplicates for verdict in verdicts)
    training_s = sum(verdict.training_s for verdict in verdicts)
    lines = [
        ("seeds", f"{len(verdicts)}, {len(failed)} failed" + (f": {numbers}" if failed else "")),
        ("faults", ", ".join(f"{injected[kind]} {kind}" for kind in FaultKind if injected[kind]) or "none"),
        ("recovery", _recovery([s for verdict in verdicts for s in verdict.recoveries_s])),
        ("goodput", f"{sum(v.steps for v in verdicts) / training_s:.3f} steps/s" if training_s else "-"),
        ("duplicates", f"{1e4 * duplicates / microbatches:.1f} per 10,000 microbatches" if microbatches else "-"),
        ("given up", str(sum(verdict.given_up for verdict in verdicts))),
        (
            "time",
            f"{sum(v.virtual_s for v in verdicts) / 3600:.2f} h simulated in {sum(v.wall_s for v in verdicts):.0f} s",
        ),
    ]
    return "\n".join(f"{label:<12} {text}" for label, text in lines)


def _recovery(seconds: Sequence[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return f"median {statistics.median(ordered):.1f} s, p99 {p99:.1f} s, over {len(ordered)} kills"
