"""Makes tables of cards (GPUs): the layers of a model that each one holds, its speed, and a newcomer's download
(`shoal plan --cards`).

All of it is arithmetic. It uses the memory that the coordinator predicts for real peers, a share of the makers' rates
for dense bfloat16 products, and network lines without other traffic.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from shoal.coordinator.cost.memory import StageMemory
from shoal.coordinator.cost.workload import Workload
from shoal.deploy.planning.figures import said_tokens
from shoal.deploy.planning.rows import Column, Rows
from shoal.deploy.terminal.plain import say_json
from shoal.deploy.terminal.screen import open_console, tell
from shoal.protocol.spec import AdapterSpec, ModelSpec, RunSpec, TrainingSpec
from shoal.protocol.toml.spec_file import load_spec

REACHED: Final = 0.4
"""The share of a GPU's dense rate that a stage's computing is assumed to reach. `tests/bench/gpu.py` measures it."""
KEPT_BYTES: Final = 1.0e9
"""The memory of a GPU that the model cannot use: the driver, torch's kernels and the desktop take it."""
IN_FLIGHT: Final = 4
"""A stage is assumed to keep the activations of this many microbatches, until their gradients return."""
LINES_MBPS: Final = (20.0, 100.0, 1_000.0)
CONTEXTS: Final = (2_048, 8_192)


class Card(msgspec.Struct, frozen=True):
    """A consumer or data-centre GPU, with its maker's figures."""

    name: str
    memory_gb: float
    tflops: float
    """The rate of dense bfloat16 products with float32 sums; of float32 products if the GPU has no bfloat16."""


CARDS: Final = (
    Card("RTX 4060", 8, 30),
    Card("RTX 3060", 12, 25),
    Card("RTX 4070", 12, 58),
    Card("Tesla T4 (fp32)", 16, 8),
    Card("RTX 5060 Ti", 16, 47),
    Card("RTX 3090", 24, 71),
    Card("RTX 4090", 24, 165),
    Card("RTX 5090", 32, 209),
    Card("RTX 6000 Ada", 48, 182),
    Card("A100", 80, 312),
    Card("H100", 80, 989),
    Card("H200", 141, 989),
)


class CardFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one GPU type with one model. Some are null if no number of these GPUs holds the model."""

    card: str
    layers: int
    """How many layers, from the second one on (without the embedding), fit on one GPU; all if the whole model fits."""
    cards: int | None = None
    """The number of these GPUs that it takes to hold the whole model once."""
    tokens_per_s: float | None = None
    """The tokens/s of a pipeline of `cards` such GPUs, as fast as its slowest stage computes; lines take no time."""
    up_mbit_s: float | None = None
    """The upload, in Mbit/s, of a GPU to both neighbours at `tokens_per_s`; null: one GPU holds the whole model."""
    fetch_gb: float | None = None
    """The most GB that a newcomer fetches before its first microbatch: a stage's weights, moments, adapters, base."""
    fetch_minutes: tuple[float, ...] | None = None
    """The minutes that `fetch_gb` takes at each download rate of `LINES_MBPS`."""


class CardsTable(msgspec.Struct, frozen=True, kw_only=True):
    """The table of one model, as `--json` prints it."""

    model: str
    parameters: float
    context: int
    line_mbit_s: tuple[float, ...]
    cards: tuple[CardFigures, ...]


def usual_models() -> list[tuple[str, RunSpec]]:
    """Return (name, spec) of models shaped like Llama, with the settings that save most memory. Models of 1, 8 and 30
    billion parameters train all weights, one of 8 billion trains adapters; each comes with all `CONTEXTS`."""
    shapes = (
        ("1 B", 2048, 16, 16, 16, 5_632, 32_000),
        ("8 B", 4096, 32, 32, 8, 14_336, 128_256),
        ("30 B", 6656, 60, 52, 52, 17_920, 32_000),
    )
    found = []
    for name, dim, num_layers, heads, kv_heads, ffn_dim, words in shapes:
        for context in CONTEXTS:
            model = ModelSpec(
                vocab_size=words,
                dim=dim,
                num_layers=num_layers,
                num_heads=heads,
                num_kv_heads=kv_heads,
                ffn_dim=ffn_dim,
                context=context,
            )
            training = TrainingSpec(microbatch_size=1, compute="bf16", keep="recompute")
            spec = RunSpec(model=model, training=training)
            found.append((f"{name}, {context:,} tokens", spec))
            if name == "8 B":
                by_layer = msgspec.structs.replace(training, keep="layers")
                adapter = AdapterSpec(kind="lora", rank=16, base="nf4")
                adapted = msgspec.structs.replace(spec, adapter=adapter, training=by_layer)
                found.append((f"8 B with adapters beside nf4, {context:,} tokens", adapted))
    return found


def cards_table(name: str, spec: RunSpec, cards: Sequence[Card] = CARDS) -> CardsTable:
    memory = StageMemory.on_card(spec, experts_held=spec.model.experts_held)
    workload = replace(Workload.of(spec), memory=memory)
    return CardsTable(
        model=name,
        parameters=workload.num_parameters,
        context=spec.model.context,
        line_mbit_s=LINES_MBPS,
        cards=tuple(figures_of(card, workload) for card in cards),
    )


def figures_of(card: Card, workload: Workload) -> CardFigures:
    """Return the card's figures. The embedding counts as part of the first layer, the head as part of the last."""
    free_bytes = card.memory_gb * 1e9 - KEPT_BYTES
    stages = stages_of(workload, free_bytes)
    first = min(1, workload.num_layers - 1)
    layers = held_from(workload, first, free_bytes) if stages is None or len(stages) > 1 else workload.num_layers
    if stages is None:
        return CardFigures(card=card.name, layers=layers)
    slowest = max(workload.job_flop(begin, end) for begin, end in stages)
    tokens_per_s = workload.tokens_per_microbatch / (slowest / (REACHED * card.tflops * 1e12))
    fetch_bytes = max(sum(workload.layer_state_bytes[begin:end]) for begin, end in stages)
    sent_bits = 8.0 * 2.0 * workload.cut_bytes / workload.tokens_per_microbatch
    return CardFigures(
        card=card.name,
        layers=layers,
        cards=len(stages),
        tokens_per_s=tokens_per_s,
        up_mbit_s=sent_bits * tokens_per_s / 1e6 if len(stages) > 1 else None,
        fetch_gb=fetch_bytes / 1e9,
        fetch_minutes=tuple(8.0 * fetch_bytes / (mbps * 1e6) / 60.0 for mbps in LINES_MBPS),
    )


def stages_of(workload: Workload, free_bytes: float) -> list[tuple[int, int]] | None:
    """Return the layers [first, last) of the fewest stages that each fit into `free_bytes`: stages of equal length if
    these fit, else each as long as possible. None: a single layer does not fit."""
    fullest, begin = [], 0
    while begin < workload.num_layers:
        held = held_from(workload, begin, free_bytes)
        if not held:
            return None
        fullest.append((begin, begin + held))
        begin += held
    even = list(pairwise(workload.num_layers * stage // len(fullest) for stage in range(len(fullest) + 1)))
    # Even stages may not fit: the ends of the model are larger than its middle.
    return even if all(_fits(workload, *cut, free_bytes) for cut in even) else fullest


def held_from(workload: Workload, begin: int, free_bytes: float) -> int:
    """Return how many consecutive layers from `begin` on fit into `free_bytes`."""
    return sum(_fits(workload, begin, end, free_bytes) for end in range(begin + 1, workload.num_layers + 1))


def _fits(workload: Workload, begin: int, end: int, free_bytes: float) -> bool:
    in_flight = IN_FLIGHT if end - begin < workload.num_layers else 1
    held_bytes = in_flight * sum(workload.layer_held_bytes[begin:end])
    return workload.resident_bytes(begin, end, members=1) + held_bytes <= free_bytes


# --- for people ---


def show_cards(path: Path | None, *, as_json: bool) -> None:
    """Print the tables. Args: path: a run file with the model; None: `usual_models`. Raises: SpecError: the file is
    invalid."""
    models = usual_models() if path is None else [(path.name, load_spec(path))]
    tables = [cards_table(name, spec) for name, spec in models]
    if as_json:
        say_json(tables)
        return
    console = open_console()
    for table in tables:
        lines_of(table, console)
        console.print()
    tell(console, LEGEND, style="dim")


LEGEND: Final = (
    f"Arithmetic, nothing was run: {REACHED:.0%} of the card's dense bfloat16 rate, {KEPT_BYTES / 1e9:g} GB of its "
    f"memory for driver and desktop, {IN_FLIGHT} microbatches in flight. layers: of the middle that the card holds. "
    "cards: that hold the model once (more are replicas); none: an end of the model is too large for such a card, "
    "which can hold layers beside larger cards. tokens/s and Mbit/s up: of a pipeline of them, if nothing else bounds "
    "it. GB: what a newcomer downloads. min@N: minutes for that with N Mbit/s down."
)


def lines_of(table: CardsTable, console: Console) -> None:
    tell(console, f"{table.model} ({said_tokens(table.parameters)} parameters)", style="bold")
    minutes = [f"min@{mbps:g}" for mbps in table.line_mbit_s]
    rows = Rows(
        console,
        [
            Column("card", 15, right=False),
            Column("layers", 6),
            Column("cards", 5),
            Column("tokens/s", 8),
            Column("Mbit/s up", 9),
            Column("GB", 5),
            *(Column(each, 8) for each in minutes),
        ],
    )
    for figures in table.cards:
        rows.row(
            figures.card,
            str(figures.layers),
            "none" if figures.cards is None else str(figures.cards),
            "-" if figures.tokens_per_s is None else f"{figures.tokens_per_s:,.0f}",
            "-" if figures.up_mbit_s is None else f"{figures.up_mbit_s:,.0f}",
            said(figures.fetch_gb),
            *(said(each) for each in figures.fetch_minutes or [None] * len(minutes)),
            style="dim" if figures.cards is None else "",
        )


def said(number: float | None) -> str:
    """Return a number with two significant digits, or all digits before the point: `0.34`, `4.8`, `26`, `1,230`."""
    if number is None:
        return "-"
    if number == 0.0:
        return "0"
    digits = max(0, 1 - math.floor(math.log10(number)))
    return f"{number:,.{digits}f}"
