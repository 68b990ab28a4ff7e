"""`shoal plan --cards`: what of a model a card holds, by arithmetic that can be done again by hand."""

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from pages import sample_of
from shoal.coordinator.cost.workload import Workload
from shoal.deploy import cli
from shoal.deploy.planning.cards import CARDS, REACHED, Card, cards_table, held_from, lines_of, stages_of, usual_models
from shoal.deploy.planning.figures import said_tokens
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec

MODEL = ModelSpec(vocab_size=512, dim=256, num_layers=12, num_heads=4, num_kv_heads=4, ffn_dim=704, context=128)
SPEC = RunSpec(model=MODEL, training=TrainingSpec(microbatch_size=1, keep="recompute"))


def shoal(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def shown(*arguments: str) -> Any:
    result = shoal("plan", "--cards", *arguments, "--json")
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout)


@pytest.mark.parametrize("free_mb", [80, 120, 200, 333, 1_000])
def test_stages_follow_one_another_fit_and_are_as_few_as_can_be(free_mb: float) -> None:
    workload, free_bytes = Workload.of(SPEC), free_mb * 1e6
    stages = stages_of(workload, free_bytes)
    assert stages is not None
    assert [begin for begin, _ in stages] == [0, *(end for _, end in stages[:-1])]
    assert stages[-1][1] == workload.num_layers
    assert all(end - begin <= held_from(workload, begin, free_bytes) for begin, end in stages)
    # One less cannot hold them: each takes all that fits, and layers are left.
    reached = 0
    for _ in stages[:-1]:
        reached += held_from(workload, reached, free_bytes)
    assert reached < workload.num_layers


def test_a_layer_that_does_not_fit_is_nobodys() -> None:
    assert stages_of(Workload.of(SPEC), 1e6) is None


def test_more_memory_holds_no_less_and_the_fetch_takes_as_long_as_its_bits() -> None:
    for name, spec in usual_models():
        table = cards_table(name, spec, [Card(f"{gb} GB", gb, 100.0) for gb in (8, 16, 24, 48, 80, 141, 2_000)])
        for less, more in pairwise(table.cards):
            assert less.layers <= more.layers
            if less.cards is not None:
                assert more.cards is not None
                assert less.cards >= more.cards
        largest = table.cards[-1]
        assert (largest.cards, largest.up_mbit_s) == (1, None)
        assert largest.layers == spec.model.num_layers
        assert largest.fetch_gb is not None
        assert largest.fetch_minutes is not None
        assert largest.fetch_minutes[1] == pytest.approx(largest.fetch_gb * 8e9 / 100e6 / 60.0)
        # 6 N FLOP a token, or 4 N beside a base that is not trained; attention and recomputation come on top.
        times = 4.0 if spec.adapter is not None else 6.0
        assert largest.tokens_per_s is not None
        assert 0.5 < largest.tokens_per_s * times * table.parameters / (REACHED * 100e12) < 1.1


def test_a_run_file_has_one_table_with_every_card(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "notes"\n[model]\ndim = 128\nnum_layers = 6\ncontext = 128\n')
    (table,) = shown("--run", str(path))
    assert [figures["card"] for figures in table["cards"]] == [card.name for card in CARDS]
    assert all(figures["cards"] == 1 for figures in table["cards"])  # a million parameters
    assert len(shown()) == len(usual_models())


def test_people_get_a_line_for_each_card_and_what_is_assumed() -> None:
    result = shoal("plan", "--cards")
    assert result.exit_code == 0, result.output
    assert result.output.count("RTX 3090") == len(usual_models())
    assert "Arithmetic, nothing was run" in result.output


def test_the_guide_shows_lines_of_it() -> None:
    told = shoal("plan", "--cards").output.splitlines()
    lines = sample_of("shoal plan --cards")
    assert len(lines) > 6
    assert [line for line in lines if _words(line) not in map(_words, told)] == []


def _words(line: str) -> list[str]:
    return line.partition(" (" if line.endswith(" parameters)") else "\n")[0].split()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--run", "no-such.toml"), "cannot read the run spec no-such.toml"),
        (("home-gpus",), "--cards is about no scenario"),
        (("--compare",), "--cards is about no scenario"),
        (("--experts", "experts.json"), "--cards is about no scenario"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(arguments: tuple[str, ...], says: str) -> None:
    result = shoal("plan", "--cards", *arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_its_lines_fit_into_80_columns() -> None:
    file = io.StringIO()
    lines_of(cards_table(*usual_models()[0]), Console(width=80, file=file))
    assert max(map(len, file.getvalue().splitlines())) <= 80


@pytest.mark.parametrize(
    ("number", "said"), [(12, "12"), (314_000, "314 K"), (999_950, "1 M"), (1.34e9, "1.34 B"), (2e13, "20 T")]
)
def test_parameters_are_said_in_the_unit_that_suits_them(number: float, said: str) -> None:
    assert said_tokens(number) == said
