import os
from pathlib import Path

import pytest

from shoal.deploy.run.run_file import DEMO_SPEC, MOE_SPEC, dump_spec, with_changes, write_spec
from shoal.protocol.errors import LocalError, SpecError
from shoal.protocol.spec import AdapterSpec, ContinuedSpec, DataSpec, OptimizerSpec, RunSpec, SourceSpec
from shoal.protocol.toml.spec_file import load_spec


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    spec = RunSpec(
        name='quotes " and \\ and ünicode',
        seed=2**62,
        data=DataSpec(source="/a b/ü \t", digest="ab"),
        optimizer=OptimizerSpec(learning_rate=1e-9, epsilon=1e-30, weight_decay=0.0),
    )
    write_spec(spec, tmp_path / "run.toml")
    assert load_spec(tmp_path / "run.toml") == spec


def test_a_path_that_is_not_utf_8_is_refused_by_its_name(tmp_path: Path) -> None:
    spec = RunSpec(data=DataSpec(source=os.fsdecode(b"/a/caf\xe9.txt")))
    with pytest.raises(LocalError) as caught:
        write_spec(spec, tmp_path / "run.toml")
    assert str(caught.value) == r"a run spec cannot name /a/caf\xe9.txt, which is not UTF-8: rename it"
    assert not (tmp_path / "run.toml").exists()


def test_a_run_that_was_continued_reads_back_equal(tmp_path: Path) -> None:
    parts = (ContinuedSpec(at=3, steps=400), ContinuedSpec(at=9, steps=500, schedule="wsd", decay_steps=2))
    spec = RunSpec(continued=parts)
    write_spec(spec, tmp_path / "run.toml")
    assert load_spec(tmp_path / "run.toml") == spec


def test_several_sources_read_back_equal(tmp_path: Path) -> None:
    sources = (SourceSpec(source="/a b/ü", weight=0.1), SourceSpec(source="hf:fish/chats", format="chat", tokens_max=9))
    spec = RunSpec(data=DataSpec(sources=sources, document_masks=False, digest="aa+bb"))
    write_spec(spec, tmp_path / "run.toml")
    assert load_spec(tmp_path / "run.toml") == spec
    tables = '[[data.sources]]\nsource = "a"\nweight = 3\n\n[[data.sources]]\nsource = "b"\nformat = "chat"\n'
    (tmp_path / "by-hand.toml").write_text(tables)
    read = load_spec(tmp_path / "by-hand.toml")
    assert read.data.sources == (SourceSpec(source="a", weight=3.0), SourceSpec(source="b", format="chat"))


def test_changes_reach_sections_and_the_top() -> None:
    spec = with_changes(RunSpec(), {"training.steps": 30, "seed": 7})
    assert (spec.training.steps, spec.seed) == (30, 7)
    assert spec.model == RunSpec().model


def test_adapters_read_back_equal_and_may_be_a_change(tmp_path: Path) -> None:
    spec = with_changes(RunSpec(), {"adapter.kind": "lora", "adapter.rank": 2, "adapter.base": "nf4"})
    assert spec.adapter == AdapterSpec(kind="lora", rank=2, base="nf4")
    write_spec(spec, tmp_path / "run.toml")
    assert load_spec(tmp_path / "run.toml") == spec
    assert with_changes(spec, {"adapter.rank": 3}).adapter == AdapterSpec(kind="lora", rank=3, base="nf4")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"swarm.stages": 7, "swarm.min_peers": 7}, "swarm.stages 7"),
        ({"training.steps": 0}, "steps"),
        (
            {"training.microbatch_size": 4096, "model.context": 1024},
            "microbatch_size 4096 makes activations of 1040 MiB",
        ),
        ({"swarm.nonsense": 1}, "nonsense"),
    ],
)
def test_an_impossible_change_names_its_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(SpecError, match=field):
        with_changes(RunSpec(), changes)


def test_the_run_with_experts_is_a_valid_one_of_two_stages_and_six_peers() -> None:
    spec = load_spec(MOE_SPEC)
    assert (spec.swarm.stages, spec.swarm.min_peers) == (2, 6)
    assert (spec.model.num_experts, spec.model.experts_per_token) == (8, 2)


def test_the_demo_is_a_valid_run_of_three_stages_and_six_peers() -> None:
    spec = load_spec(DEMO_SPEC)
    assert (spec.swarm.stages, spec.swarm.min_peers) == (3, 6)
    assert "name" in dump_spec(spec)
