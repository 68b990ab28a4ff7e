"""Writes a demo's summary for people: a label and a text for each line. Pure."""

from shoal.deploy.demo.expert_book import ExpertFigures
from shoal.deploy.demo.summary import ChaosFigures, Summary
from shoal.deploy.words import printable

Line = tuple[str, str]


def summary_lines(summary: Summary, *, unit: str) -> list[Line]:
    """Args: unit: what a loss is of: a byte, a token. An empty label: the text goes alone."""
    tokens = f"{summary.tokens_per_s:,.0f} tokens/s"
    losses = f"{_loss(summary.loss_first)} -> {_loss(summary.loss_last)} nats a {unit}, val {_loss(summary.val_loss)}"
    lines = [
        ("steps", f"{summary.steps} in {summary.seconds:.0f} s, {tokens}"),
        ("loss", losses),
        ("staleness", f"{summary.staleness_mean:.2f} steps, {summary.coordinator_terms} coordinator terms"),
        (
            "ledger",
            f"{summary.duplicates} microbatches twice ({summary.duplicates_share:.2%}), {summary.given_up} given up, "
            f"{summary.dissenting} members dissented; longest wait for a step {summary.stall_s_max:.1f} s",
        ),
    ]
    if summary.eras:
        lines.append(("snapshots", f"the run went back to one {summary.eras} times"))
    if summary.experts:
        lines.append(_experts(summary.experts))
    if summary.chaos:
        lines.append(_chaos(summary.chaos))
    if summary.failed:
        lines.append(("failed", f"{summary.failed} peers came to a bad end by themselves"))
    if summary.rss_mb_max:
        lines.append(("memory", f"at most {max(summary.rss_mb_max.values()):.0f} MB a peer"))
    if summary.snapshot:
        # An untrained model writes any byte, the terminal's commands too.
        text = [("", printable(line)) for line in summary.sample.splitlines()]
        lines += [("snapshot", summary.snapshot), ("sample", ""), *text]
    return [*lines, ("logs", f"{summary.folder}/logs")]


def _experts(experts: ExpertFigures) -> Line:
    fewest, most = experts.holders_min, experts.holders_max
    copies = str(fewest) if fewest == most else f"{fewest} to {most}"
    load = "" if experts.load_max is None else f"; the busiest had {experts.load_max:.1f} times the usual load"
    return "experts", f"each on {copies} peers; placed anew {experts.placements} times, {experts.copies} copies{load}"


def _chaos(chaos: ChaosFigures) -> Line:
    median = "-" if chaos.recovery_s_median is None else f"{chaos.recovery_s_median:.1f} s"
    lost = "" if chaos.lost_s_max is None else f"; at most {chaos.lost_s_max:.1f} s of work lost by one"
    return (
        "chaos",
        f"{chaos.kills} peers killed, {chaos.coordinator_kills} coordinating, {chaos.suspensions} suspended; "
        f"full pace again after {median} (median of {len(chaos.recovery_s)}, never after {chaos.unrecovered}){lost}",
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
