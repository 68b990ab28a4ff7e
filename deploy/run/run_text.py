"""Finds the text of a run on this machine: the host's original or a volunteer's copy."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from shoal.deploy.ship.scores import source_names
from shoal.deploy.state import places
from shoal.deploy.terminal.progress import progress_bar
from shoal.peer.data.corpus import PYTHON_LIBRARY, Corpus, load_corpus
from shoal.peer.data.microbatch import passes
from shoal.peer.data.packing import OnProgress
from shoal.peer.data.tokenizer import BYTES
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec, RunSpec


def load_own_corpus(spec: RunSpec) -> tuple[RunSpec, Corpus]:
    """Load the host's text; return the spec with the text's digests, and the text.

    Raises: DataError: the text is missing or invalid, or its digest differs from the one in the spec.
    """
    with progress_bar("reading the text") as tell:
        corpus = _load(spec.data, spec, on_progress=tell)
    if spec.data.digest not in ("", corpus.digest):
        raise DataError(
            f"{spec.data.named} is not the text that this run trains on: it was changed, or something was added to it "
            "or removed, since. Restore it, or begin a new run: `shoal host` a run file that names no `digest`"
        )
    data = msgspec.structs.replace(spec.data, digest=corpus.digest, tokenizer_digest=corpus.tokenizer_digest)
    return msgspec.structs.replace(spec, data=data), corpus


def text_in_words(spec: RunSpec, corpus: Corpus) -> tuple[str, ...]:
    """Return sentences on each source of text: how much of it is read, counts in the loss or is left out, and how often
    it is read."""
    names, of_each = source_names(spec.data), passes(corpus, spec)
    said: list[str] = []
    for name, data, source in zip(names, spec.data.each, corpus.sources, strict=True):
        said += (_read_in_words(name, data, source), *source.account.sentences(name), *_cut_in_words(name, source))
    over = [f"{number:.3g} over {name}" for number, name in zip(of_each, names, strict=True)]
    return (*said, f"data passes in {spec.training.steps:,} steps: {', '.join(over)}")


def _read_in_words(name: str, data: DataSpec, corpus: Corpus) -> str:
    kind = "text" if corpus.packs is None else "conversation"
    kind += "s" if corpus.num_files > 1 else ""
    unit = "bytes" if data.tokenizer == BYTES else "tokens"
    share = "all" if corpus.learnt == 1.0 else f"{100 * corpus.learnt:.3g}%"
    return f"{name}: {corpus.num_files:,} {kind}, {corpus.text_N.numel():,} {unit}, of which {share} are learnt"


def _cut_in_words(name: str, corpus: Corpus) -> Iterator[str]:
    if corpus.packs is None:
        return
    context = corpus.packs[0].context
    if shortened := sum(packs.num_shortened for packs in corpus.packs):
        yield f"cut in {name}: the ends of {shortened:,} that are longer than model.context {context}"
    if left_out := sum(packs.num_left_out for packs in corpus.packs):
        yield f"left out of {name}: {left_out:,} with their answers beyond model.context {context}"


def find_corpus(
    spec: RunSpec, *, data: str = "", tokenizer: str = "", on_progress: OnProgress | None = None
) -> Corpus | None:
    """Return the run's text, or None if it is not on this machine.

    A path in the spec names a file of the host and is never read here: otherwise a stranger would choose which local
    file this machine reads, or what it fetches from the hub.

    Args:
        data: the user's path of the run's text, or several paths separated by commas, in the order of the spec's
            sources; empty: none.
        tokenizer: the user's path of the run's tokenizer.json; empty: none.
    Raises: DataError: the text that the user named is missing or not the run's.
    """
    needs_tokenizer, each = spec.data.tokenizer != BYTES, spec.data.each
    is_here = all(one.source == PYTHON_LIBRARY for one in each)
    if not data and (not is_here or (needs_tokenizer and not tokenizer)):
        return None
    if needs_tokenizer and not tokenizer:
        raise DataError("this run has a vocabulary of its own: give its tokenizer.json with --tokenizer")
    sources = (data,) if len(each) == 1 else tuple(data.split(","))
    if data and len(sources) != len(each):
        raise DataError(
            f"this run reads {len(each)} sources, and --data names {len(sources)}: name all, in the order of "
            "`data.sources`, with commas between them"
        )
    wanted = spec.data.found_at(sources) if data else spec.data
    try:
        path = Path(tokenizer).expanduser() if needs_tokenizer else None
        corpus = _load(wanted, spec, tokenizer=path, on_progress=on_progress)
    except DataError:
        if data:
            raise
        return None
    if corpus.digest == spec.data.digest:
        return corpus
    if data:
        raise DataError(f"{data} is not the text that this run trains on")
    return None


def _load(
    data: DataSpec, spec: RunSpec, *, tokenizer: Path | None = None, on_progress: OnProgress | None = None
) -> Corpus:
    corpus = load_corpus(
        data,
        context=spec.model.context,
        tokenizer=tokenizer,
        cache=places.cache_root() / "text",
        on_progress=on_progress,
    )
    corpus.check_fits(spec.model)
    return corpus
