"""Chooses the revision of the spec under which a stopped or finished run goes on, and explains this choice.

`going_on` reads this machine's files of the run and starts nothing.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

import msgspec

from shoal.deploy.base.words import NAMED_MAX
from shoal.deploy.run.run_file import with_changes
from shoal.deploy.state.run_folder import Kept, RunFolder
from shoal.peer.model.schedule import legs, rate_of
from shoal.protocol.errors import LocalError
from shoal.protocol.layers import held_keys
from shoal.protocol.spec import RunSpec, continued_spec, unchanging_bytes

_Goal = tuple[int, str, int | None]
_GOAL: Final = ("training.steps", "optimizer.schedule", "optimizer.decay_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingOn:
    """The spec under which a run is resumed or continued, and sentences that tell the user what will happen."""

    spec: RunSpec
    sentences: tuple[str, ...]
    finished: bool = False
    is_new: bool = False
    """True if this machine has no files of the run yet."""


def same_run(asked: RunSpec, known: RunSpec, chosen: Collection[str] = ()) -> bool:
    """True if the spec `asked` belongs to the run of which `known` is a revision.

    Args: chosen: fields of `asked`, such as `optimizer.warmup_steps`, that a rule filled in and not a person. Their
    values need not agree: another version of shoal, or another number of steps, may have filled in other values.
    """
    values = {path: attrgetter(path)(known) for path in chosen}
    try:
        return unchanging_bytes(with_changes(asked, values)) == unchanging_bytes(known)
    except LocalError:
        return False


def going_on(asked: RunSpec, folder: RunFolder, *, steps: int | None = None) -> GoingOn:
    """Decide how to resume the run in `folder`.

    Args:
        asked: the spec from the run file as it is now, or the newest revision itself.
        steps: the wanted number of steps; None: that of `asked`.
    Raises: LocalError: the run cannot go on in this way; the sentence says why.
    """
    known = folder.spec()
    assert known is not None
    goal = _goal(asked, known, steps)
    reached = min(folder.reached(), known.training.steps)
    at = max((reached, *(part.at for part in known.continued)))
    if goal == _goal_of(known):
        spec = continued_spec(known, with_changes(known, {"swarm.min_peers": asked.swarm.min_peers}), at=at)
        if folder.is_finished():
            return GoingOn(spec=known, sentences=tuple(_finished(known, folder)), finished=True)
        return GoingOn(spec=spec, sentences=tuple(_resumed(spec, folder, asked)))
    if goal[0] <= reached:
        raise LocalError(
            f"{_called(known, folder)} has reached step {reached}, and {goal[0]} is not more: "
            "give a higher number of steps, or another `seed` or `name` to a new run"
        )
    try:
        wanted = with_changes(asked, dict(zip(_GOAL, goal, strict=True)))
        spec = continued_spec(known, wanted, at=at)
    except ValueError as error:
        raise LocalError(f"{_called(known, folder)} cannot continue like this: {error}") from error
    return GoingOn(spec=spec, sentences=tuple(_continued(spec, known, folder, at)))


def new_run_note(asked: RunSpec, others: Iterable[RunFolder], chosen: Collection[str] = ()) -> str:
    """Return a note that `asked` is a new run, if one of the runs `others` has its name and has done steps; else ""."""
    begun = [(other.reached(), other, spec) for other in others if (spec := other.spec()) is not None]
    begun = [entry for entry in begun if entry[0] > 0 and entry[2].name == asked.name]
    if not begun:
        return ""
    reached, folder, spec = max(begun, key=lambda entry: (entry[0], entry[1].run))
    return (
        f"this is a new run: {_differences(asked, spec, chosen)} not as in {_called(spec, folder)}, "
        f"which is at step {reached} of {spec.training.steps} and stays as it is"
    )


# --- which spec ---


def _goal_of(spec: RunSpec) -> _Goal:
    return spec.training.steps, spec.optimizer.schedule, spec.optimizer.decay_steps


def _goal(asked: RunSpec, known: RunSpec, steps: int | None) -> _Goal:
    """Return the wanted goal (steps, schedule, decay steps). If `asked` has the goal of an earlier revision, the run
    file was not edited since that revision, so the newest revision's goal is valid."""
    earlier = [(part.steps, part.schedule, part.decay_steps) for part in known.continued]
    goal = _goal_of(asked)
    if goal in earlier:
        goal = _goal_of(known)
    return goal if steps is None else (steps, *goal[1:])


# --- what is said ---


def _called(spec: RunSpec, folder: RunFolder) -> str:
    return f"run {spec.name} ({folder.run})"


def _resumed(spec: RunSpec, folder: RunFolder, asked: RunSpec) -> Iterable[str]:
    reached = folder.reached()
    if reached == 0:
        return
    yield f"{_called(spec, folder)} goes on: it was at step {reached} of {spec.training.steps}"
    if asked.training.steps != spec.training.steps:
        yield f"the run file says {asked.training.steps} steps; the run has been continued to {spec.training.steps}"
    yield from _where_it_begins(spec, folder)


def _where_it_begins(spec: RunSpec, folder: RunFolder) -> Iterable[str]:
    """Say where training resumes, if that is not the last known step.

    Raises: LocalError: a snapshot was saved, none can be read here, and no other peer can have one.
    """
    kept, reached = folder.kept(), folder.reached()
    version = kept.newest_whole(held_keys(spec.model, placed=spec.swarm.expert_slots > 0))
    # A short run can end before its peers are noted; but partial, undamaged snapshots mean that others have the rest.
    others = folder.has_met_others() or (version is None and bool(kept.layers) and not kept.damaged)
    if version is None and not others:
        if kept.saved:
            raise LocalError(_lost(spec, folder, kept))
        version = 0
    if kept.saved and not kept.layers:
        yield f"{_why_unreadable(folder, kept)}: the run goes on once machines are here that have a copy"
    elif version is None:
        yield "training goes on from the newest step that its machines have together"
    elif version < reached:
        where = f"step {version}, the newest snapshot that can be read here" if version else "its beginning"
        elsewhere = ", unless the other machines have a newer one" if others else ""
        yield f"training goes on from {where}{elsewhere}"


def _why_unreadable(folder: RunFolder, kept: Kept) -> str:
    if not kept.damaged:
        return f"there is no whole snapshot in {folder.path / 'snapshots'} any more (is its disk mounted?)"
    more = f" (and {len(kept.damaged) - 1} more)" if kept.damaged[1:] else ""
    return f"{kept.damaged[0]}{more}"


def _lost(spec: RunSpec, folder: RunFolder, kept: Kept) -> str:
    return (
        f"{_called(spec, folder)} was saved at step {kept.saved}, and {_why_unreadable(folder, kept)}; no other "
        "machine has taken part, so nobody else has a copy: bring the folder back, or begin a new run with another "
        "`seed` or `name`"
    )


def _continued(spec: RunSpec, before: RunSpec, folder: RunFolder, at: int) -> Iterable[str]:
    was, steps = before.training.steps, spec.training.steps
    ended = "where it had ended" if at >= was else f"it was to end at step {was}"
    yield f"{_called(spec, folder)} goes on from step {at} to step {steps} ({ended})"
    yield "its name, its data order and its weights stay"
    yield from _where_it_begins(spec, folder)
    yield learning_rate_in_words(spec, at)


def learning_rate_in_words(spec: RunSpec, at: int) -> str:
    """Return a sentence about the learning rate from step `at` on."""
    optimizer, steps = spec.optimizer, spec.training.steps
    leg = legs(optimizer, steps, spec.continued)[-1]
    peak, final = optimizer.learning_rate, optimizer.learning_rate * optimizer.final_learning_rate_fraction
    parts = []
    if leg.top_at > at:
        parts.append(f"climbs from {rate_of(spec, max(at - 1, 0)):.2g} to {peak * leg.top:.2g} by step {leg.top_at}")
    if leg.schedule == "constant":
        parts.append(f"stays at {peak * leg.top:.2g}")
    else:
        if leg.falls_at > max(at, leg.top_at):
            parts.append(f"stays at {peak * leg.top:.2g} to step {leg.falls_at}")
        parts.append(f"falls to {final:.2g} at step {steps}")
    return f"learning rate ({leg.schedule}): {', then '.join(parts)}"


def _finished(spec: RunSpec, folder: RunFolder) -> Iterable[str]:
    loss = folder.last_loss()
    told = f", loss {loss:.3f}" if loss is not None else ""
    yield f"{_called(spec, folder)} is finished: {spec.training.steps} of {spec.training.steps} steps{told}"
    more = 2 * spec.training.steps
    for why, command in (
        ("train on, from where it ended", f"shoal continue {folder.run} --steps {more}"),
        ("let the model write", f'shoal generate {folder.run} --prompt "Once"'),
        ("make a folder that transformers loads", f"shoal export {folder.run} my-model"),
        ("a page with its curves", f"shoal report {folder.run}"),
        ("delete it from this machine", f"shoal runs remove {folder.run}"),
    ):
        yield f"  {why + ':':<38} {command}"


def ended_in_words(folder: RunFolder) -> str:
    """Tell a volunteer that finds no peers that the run was finished; "" if it was not, or its spec is not here."""
    spec = folder.spec()
    if spec is None or not folder.is_finished():
        return ""
    return (
        f"{_called(spec, folder)} was finished at step {spec.training.steps}, and nobody of it is up: "
        "if its host continues it, the same command takes part again"
    )


def _differences(asked: RunSpec, known: RunSpec, chosen: Collection[str]) -> str:
    """Return the names of unchangeable fields in which two specs differ, and a verb: `seed and model.dim are`."""
    ours, theirs = (_flat(msgspec.to_builtins(spec)) for spec in (asked, known))
    unchanging = set(ours | theirs) - {*chosen, *_GOAL, "swarm.min_peers", "continued"}
    fields = sorted(path for path in unchanging if ours.get(path) != theirs.get(path))
    digests = ("data.digest", "data.tokenizer_digest")  # which the host computes from the text
    named = list(dict.fromkeys("the text" if path in digests else path for path in fields)) or ["something"]
    if named[NAMED_MAX:]:
        named = [*named[:NAMED_MAX], f"{len(named) - NAMED_MAX} more"]
    listed = " and ".join([", ".join(named[:-1]), named[-1]]) if named[1:] else named[0]
    return f"{listed} {'are' if named[1:] else 'is'}"


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
