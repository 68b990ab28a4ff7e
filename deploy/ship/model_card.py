"""Writes the card of an exported model, which states its origin: `README.md` for people, `shoal.json` for programs.

A card has only the last part of a local path, so that a published model does not reveal folder names.
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from shoal.deploy.base.words import amount, printable
from shoal.deploy.record.found import records_of
from shoal.deploy.record.reading import read_record
from shoal.deploy.ship.found_snapshot import FoundSnapshot
from shoal.deploy.ship.model_folder import CARD, own_file, read_bytes
from shoal.deploy.ship.scores import Score, evaluations_of, source_names
from shoal.peer.data.documents import HUB
from shoal.peer.model.layout import num_parameters
from shoal.protocol.spec import RunSpec

PROVENANCE: Final = "shoal.json"
_LICENCE_FILES: Final = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)[\w.-]{0,40}", re.IGNORECASE)
"""Matches names of licence files in the base's folder, which must accompany every copy of the base's weights."""


class DataSource(msgspec.Struct, frozen=True, kw_only=True):
    """One source of the run's text."""

    source: str
    digest: str
    """BLAKE3 digest of the source's tokens and of the mask of tokens that count in the loss; empty: unknown."""
    format: str
    weight: float
    subset: str = ""
    split: str = ""


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """The model that gave the run its initial weights."""

    name: str
    licence: str
    digests: tuple[str, ...]
    """BLAKE3 digests of the layers' parameters, embedding first."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a model."""

    shoal: str
    """The version of shoal that wrote the card."""
    run: str
    name: str
    era: int
    steps: int
    """The number of steps done, out of `steps_planned`."""
    steps_planned: int
    tokens: int
    """The number of tokens in all steps done; those of microbatches that steps left out count, too."""
    parameters: int
    base: Base | None
    """The model with the initial weights; None: they were random, drawn from the seed."""
    sources: tuple[DataSource, ...]
    tokenizer_digest: str
    """BLAKE3 digest of tokenizer.json; empty: there is no such file, because each byte is a token."""
    contributors: int | None
    """The number of peers that took part, by this machine's record of the run; None: it has no record."""
    evaluations: tuple[Score, ...]


def provenance_of(snapshot: FoundSnapshot) -> Provenance:
    """Return what this machine knows about a snapshot's origin."""
    spec, initial = snapshot.spec, snapshot.spec.initial
    records = [len({line.peer for line in read_record(path).peers}) for path in records_of(snapshot.run)]
    base = None
    if initial.digests:
        base = Base(name=initial.name or Path(initial.source).name, licence=initial.licence, digests=initial.digests)
    return Provenance(
        shoal=importlib.metadata.version("shoal"),
        run=snapshot.run,
        name=spec.name,
        era=snapshot.era,
        steps=snapshot.version,
        steps_planned=spec.training.steps,
        tokens=snapshot.version * spec.tokens_per_step,
        parameters=num_parameters(spec.model.whole),
        base=base,
        sources=_sources(spec),
        tokenizer_digest=spec.data.tokenizer_digest,
        # A record names only the peers of the time at which its own peer was present: take the largest.
        contributors=max(records, default=0) or None,
        evaluations=tuple(evaluations_of(snapshot.run, snapshot.era, snapshot.version)),
    )


def card_files(snapshot: FoundSnapshot, *, library: str) -> dict[str, bytes]:
    """Return name -> content of README.md, shoal.json, and the base's licence files if they are on this machine.

    Args: library: the library that loads the export, "transformers" or "peft".
    """
    found = provenance_of(snapshot)
    facts = msgspec.json.format(msgspec.json.encode(found)) + b"\n"
    return {CARD: card(found, library=library).encode(), PROVENANCE: facts} | _licence_files(snapshot.spec)


def card(found: Provenance, *, library: str) -> str:
    """Return the card for people, the text of README.md."""
    base = found.base
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation", "tags": ["shoal"]}
    if base is not None:
        front |= {"base_model": base.name} | ({"license": base.licence} if base.licence else {})
    if hub := [one.source.removeprefix(HUB) for one in found.sources if one.source.startswith(HUB)]:
        front["datasets"] = hub
    # JSON is valid YAML.
    head = [f"{name}: {msgspec.json.encode(value).decode()}" for name, value in front.items()]
    lines = ["---", *head, "---", "", f"# {printable(found.name)}", ""]
    lines += [_how_it_came_to_be(found, is_adapter=library == "peft"), "", "| | |", "|---|---|", *_facts(found)]
    lines += ["", "## Data", "", *_data(found)]
    if found.evaluations:
        lines += ["", "## Evaluation", "", "| of | loss | perplexity | bits a byte | value |", "|---|---|---|---|---|"]
        lines += [_row(score) for score in found.evaluations]
    lines += ["", "## Licence", "", _licence(found), ""]
    return "\n".join(lines)


def _how_it_came_to_be(found: Provenance, *, is_adapter: bool) -> str:
    base = printable(found.base.name) if found.base else ""
    if is_adapter:
        return f"Adapters for {base or 'a model from a seed'}, trained by a swarm of volunteers with shoal."
    began = f"tuned from {base}" if base else "trained from scratch"
    return f"A language model, {began} by a swarm of volunteers with shoal."


def _facts(found: Provenance) -> list[str]:
    facts = [
        ("parameters", f"{found.parameters:,}"),
        ("base", printable(found.base.name) if found.base else "none: weights from the run's seed"),
        ("run", f"`{found.run}`"),
        ("steps", f"{found.steps:,} of {found.steps_planned:,}"),
        ("tokens", amount(found.tokens)),
        ("contributors", "not recorded here" if found.contributors is None else f"{found.contributors}"),
        ("written by", f"shoal {found.shoal}"),
    ]
    return [f"| {name} | {value} |" for name, value in facts]


def _data(found: Provenance) -> list[str]:
    total = sum(one.weight for one in found.sources)
    lines = []
    for one in found.sources:
        parts = [f"subset {one.subset}"] if one.subset else []
        parts += [f"split {one.split}"] if one.source.startswith(HUB) else []
        parts += ["chats: answers alone are learnt"] if one.format == "chat" else []
        parts += [f"{one.weight / total:.0%} of the samples"] if len(found.sources) > 1 else []
        lines.append(f"- `{printable(one.source)}`" + (f" ({', '.join(parts)})" if parts else ""))
        lines += [f"  - BLAKE3 of its tokens: `{one.digest}`"] if one.digest else []
    if found.tokenizer_digest:
        lines.append(f"- BLAKE3 of the tokenizer.json: `{found.tokenizer_digest}`")
    return lines


def _row(score: Score) -> str:
    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.4g}"

    value = cell(score.value) + (f" ± {score.stderr:.2g}" if score.stderr else "")
    cells = (score.name.replace("|", "/"), cell(score.loss), cell(score.perplexity), cell(score.bits_per_byte), value)
    return "| " + " | ".join(cells) + " |"


def _licence(found: Provenance) -> str:
    if found.base is None:
        return "It was not stated when the model was exported."
    if found.base.licence:
        return f"{printable(found.base.licence)}, that of {printable(found.base.name)}. Its terms go with this model."
    return f"That of {printable(found.base.name)}, which its folder does not say: look there before you pass it on."


def _sources(spec: RunSpec) -> tuple[DataSource, ...]:
    weights = [one.weight for one in spec.data.sources] or [1.0]
    digests = spec.data.digests or ("",) * len(weights)
    return tuple(
        DataSource(
            source=name,
            digest=digest,
            format=one.format,
            weight=weight,
            subset=one.subset,
            split=one.split if one.source.startswith(HUB) else "",
        )
        for one, weight, name, digest in zip(spec.data.each, weights, source_names(spec.data), digests, strict=True)
    )


def _licence_files(spec: RunSpec) -> dict[str, bytes]:
    folder = Path(spec.initial.source).expanduser()
    if not spec.initial.digests or not folder.is_dir():
        return {}
    names = sorted(entry.name for entry in folder.iterdir() if _LICENCE_FILES.fullmatch(entry.name))
    return {name: read_bytes(own_file(folder, name)) for name in names}
