"""Keeps the scores that `shoal eval` gave each version of a run: `shoal export` and displays show them."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.state import places
from shoal.peer.data.documents import HUB, PYTHON_LIBRARY, printable
from shoal.protocol.spec import DataSpec


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One result of an evaluation."""

    name: str
    """`validation`, a file's name, or a task's name with its metric."""
    loss: float | None = None
    """The mean loss in nats a token, over `tokens` tokens."""
    perplexity: float | None = None
    tokens: int | None = None
    bits_per_byte: float | None = None
    """The loss of a text in bits a byte, by which models with different vocabularies can be compared."""
    value: float | None = None
    stderr: float | None = None
    examples: int | None = None


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `shoal eval` on one version."""

    run: str
    era: int
    version: int
    time: float
    """The time of the evaluation, in seconds since 1970."""
    scores: tuple[Score, ...]


def keep_evaluation(run: str, era: int, version: int, scores: list[Score]) -> Path:
    """Append an evaluation to the run's file. Raises: LocalError: the file cannot be written."""
    path = _path(run)
    line = Evaluation(run=run, era=era, version=version, time=time.time(), scores=tuple(scores))
    with or_say(f"cannot keep the results in {path}"):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
    return path


def evaluations_of(run: str, era: int, version: int) -> list[Score]:
    """Return a version's scores, the newest of each name; names are in the order in which they were first scored."""
    found: dict[str, Score] = {}
    for line in evaluations(run):
        if (line.era, line.version) == (era, version):
            found |= {score.name: score for score in line.scores}
    return list(found.values())


def evaluations(run: str) -> list[Evaluation]:
    """Return all evaluations of a run. Skip unreadable lines: a crash may have cut a line off."""
    try:
        lines = _path(run).read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Evaluation))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return found


async def tell_scores(run: str, say: Callable[[str], None], *, every_s: float = 5.0) -> None:
    """Pass each new score of a run to `say` until cancelled. Args: every_s: the seconds between two readings."""
    known = len(await asyncio.to_thread(evaluations, run))
    while True:
        await asyncio.sleep(every_s)
        found = await asyncio.to_thread(evaluations, run)
        for evaluation in found[known:]:
            for score in evaluation.scores:
                say(f"shoal eval, version {evaluation.version}: {in_words(score)}")
        known = len(found)


def in_words(score: Score) -> str:
    """Format a score as one line for people."""
    parts = []
    if score.loss is not None:
        over = f" over {score.tokens:,} tokens" if score.tokens is not None else ""
        much = "" if score.perplexity is None else f", perplexity {score.perplexity:.4g}"
        parts.append(f"loss {score.loss:.4f} nats a token{much}{over}")
    if score.bits_per_byte is not None:
        parts.append(f"{score.bits_per_byte:.4f} bits a byte")
    if score.value is not None:
        parts.append(f"{score.value:.4f}" + (f" ± {score.stderr:.4f}" if score.stderr else ""))
    if score.examples is not None:
        parts.append(f"{score.examples:,} examples")
    return f"{score.name}: {', '.join(parts)}"


def source_names(data: DataSpec) -> list[str]:
    """Return public names for a run's sources: only the last part of a local path; equal names get numbers."""
    names: list[str] = []
    for one in data.each:
        is_known = one.source == PYTHON_LIBRARY or one.source.startswith(HUB)
        name = one.source if is_known else printable(Path(one.source).name)
        count = sum(known == name or known.startswith(f"{name} (") for known in names)
        names.append(f"{name} ({count + 1})" if count else name)
    return names


def _path(run: str) -> Path:
    safe = "".join(letter for letter in run if letter.isalnum())
    return places.state_root() / "evaluations" / f"{safe}.jsonl"
