import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3

from shoal.protocol.decoder import DecoderSpec
from shoal.protocol.errors import SpecError
from shoal.protocol.identity import PeerID
from shoal.protocol.limits import RECORD_BYTES_MAX
from shoal.protocol.spec import (
    CONTINUED_MAX,
    AdapterSpec,
    ContinuedSpec,
    DataSpec,
    InitialSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    SourceSpec,
    SwarmSpec,
    TrainingSpec,
    continued_spec,
    decode_spec,
    encode_spec,
    run_id,
)
from shoal.protocol.toml.spec_file import load_spec


def test_a_spec_that_went_over_the_wire_is_the_same() -> None:
    spec = RunSpec(training=TrainingSpec(compensation="calibrated", s_max=2))
    assert decode_spec(encode_spec(spec)) == spec


def test_who_still_says_predict_is_told_in_one_line_what_to_say_instead(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\npredict = false\n")
    builtins = msgspec.to_builtins(RunSpec())
    builtins["training"]["predict"] = False
    for read in (lambda: load_spec(path), lambda: decode_spec(msgspec.msgpack.encode(builtins))):
        with pytest.raises(SpecError, match=r'has no .predict..*"pipeoptim".*"stash" instead of false') as raised:
            read()
        assert "\n" not in str(raised.value)


def test_the_first_steps_are_synchronous_for_twice_as_long_as_the_optimizer_warms_up_or_as_is_said() -> None:
    warm = OptimizerSpec(warmup_steps=7)
    assert RunSpec(optimizer=warm).synchronous_steps == 14
    assert RunSpec(optimizer=OptimizerSpec(name="muon")).synchronous_steps == 0, "which gains nothing by it"
    assert RunSpec(optimizer=warm, training=TrainingSpec(synchronous_steps=0)).synchronous_steps == 0
    with pytest.raises(ValueError, match="synchronous_steps must not be negative, is -1"):
        TrainingSpec(synchronous_steps=-1)


def test_an_unknown_compensation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\ncompensation = "hope"\n')
    with pytest.raises(SpecError, match=r"compensation cannot be 'hope': it is one of"):
        load_spec(path)


def test_a_spec_that_uses_nothing_new_has_the_bytes_that_it_always_had() -> None:
    """Or runs that are under way could not be joined by who upgrades."""
    first = RunSpec(swarm=SwarmSpec(stages=3, min_peers=6))
    assert blake3(encode_spec(first) + b"owner").hexdigest(length=8) == "e37fc9b64b38ae7a"
    assert run_id(first, PeerID("owner")) == "a0e8fea3f4778cc6"


def test_a_spec_that_says_how_many_stages_still_says_it_and_another_is_another_run() -> None:
    said = decode_spec(encode_spec(RunSpec(swarm=SwarmSpec(stages=3, min_peers=6))))
    assert (said.swarm.stages, said.swarm.min_peers, said.swarm.stages_max) == (3, 6, 3)
    free = decode_spec(encode_spec(RunSpec()))
    assert (free.swarm.stages, free.swarm.min_peers, free.swarm.stages_max) == ("auto", 1, None)
    assert run_id(free, PeerID("owner")) != run_id(said, PeerID("owner"))


def test_a_number_of_stages_is_kept_as_soon_as_there_are_so_many_peers() -> None:
    assert [SwarmSpec(stages=3).stages_for(peers) for peers in (1, 2, 3, 40)] == [None, None, 3, 3]
    assert [SwarmSpec().stages_for(peers) for peers in (1, 40)] == [None, None]
    assert SwarmSpec(stages=3, min_peers=1).min_peers == 1
    for wrong in ({"stages": 0}, {"stages": 1 << 20}, {"min_peers": 0}):
        with pytest.raises(ValueError, match="must be"):
            SwarmSpec(**wrong)


def test_revisions_of_a_run_have_one_name_and_other_runs_have_others() -> None:
    owner = PeerID("owner")
    spec = RunSpec(training=TrainingSpec(steps=100))
    wanted = RunSpec(
        training=TrainingSpec(steps=200), optimizer=OptimizerSpec(schedule="wsd"), swarm=SwarmSpec(min_peers=3)
    )
    later = continued_spec(spec, wanted, at=60)
    assert (later.training.steps, later.optimizer.schedule, later.swarm.min_peers) == (200, "wsd", 3)
    assert later.continued == (ContinuedSpec(at=60, steps=100),)
    assert (spec.revision, later.revision) == (0, 1)
    assert run_id(spec, owner) == run_id(wanted, owner) == run_id(later, owner)
    assert decode_spec(encode_spec(later)) == later != spec
    assert continued_spec(later, later, at=150) is later, "nothing changes"
    others = [
        RunSpec(seed=1),
        RunSpec(optimizer=OptimizerSpec(learning_rate=1e-3)),
        RunSpec(training=TrainingSpec(s_max=0)),
        RunSpec(swarm=SwarmSpec(stages=2)),
    ]
    assert len({run_id(other, owner) for other in (spec, *others)}) == 5
    assert run_id(spec, PeerID("another")) != run_id(spec, owner)


def test_a_run_is_continued_forwards_only() -> None:
    spec = RunSpec(training=TrainingSpec(steps=100))
    with pytest.raises(ValueError, match=r"continued at step 60, after training\.steps 50"):
        continued_spec(spec, RunSpec(training=TrainingSpec(steps=50)), at=60)
    once = continued_spec(spec, RunSpec(training=TrainingSpec(steps=200)), at=100)
    with pytest.raises(ValueError, match="in the order of its steps"):
        continued_spec(once, RunSpec(training=TrainingSpec(steps=300)), at=90)
    many = RunSpec(continued=(ContinuedSpec(at=400, steps=400, schedule="wsd", decay_steps=99),) * CONTINUED_MAX)
    assert len(encode_spec(many)) < RECORD_BYTES_MAX / 2
    with pytest.raises(ValueError, match="64 times at most"):
        continued_spec(many, RunSpec(training=TrainingSpec(steps=500)), at=400)


def test_decay_steps_are_of_wsd() -> None:
    assert OptimizerSpec(schedule="wsd", decay_steps=5).decay_steps == 5
    with pytest.raises(ValueError, match="means nothing with schedule"):
        OptimizerSpec(decay_steps=5)
    with pytest.raises(ValueError, match="must be positive"):
        OptimizerSpec(schedule="wsd", decay_steps=0)


def test_what_is_new_is_in_the_bytes_where_it_says_something() -> None:
    specs = [
        RunSpec(),
        RunSpec(data=DataSpec(tokenizer="x.json", tokenizer_digest="00")),
        RunSpec(data=DataSpec(tokens_max=5)),
        RunSpec(data=DataSpec(field="content")),
        RunSpec(data=DataSpec(format="chat")),
        RunSpec(data=DataSpec(document_masks=True)),
        RunSpec(data=DataSpec(document_masks=False)),
        RunSpec(data=DataSpec(sources=(SourceSpec(source="a"), SourceSpec(source="b", weight=2.0)))),
        RunSpec(initial=InitialSpec(source="/weights", digests=("00",) * 8)),
        RunSpec(initial=InitialSpec(source="/weights", digests=("00",) * 8, name="fish/7B", licence="apache-2.0")),
        RunSpec(training=TrainingSpec(synchronous_steps=RunSpec().synchronous_steps)),
        RunSpec(optimizer=OptimizerSpec(schedule="constant")),
        RunSpec(optimizer=OptimizerSpec(schedule="wsd")),
        RunSpec(optimizer=OptimizerSpec(schedule="wsd", decay_steps=7)),
        RunSpec(continued=(ContinuedSpec(at=3, steps=9),)),
        RunSpec(swarm=SwarmSpec(stages=1)),
        RunSpec(model=ModelSpec(subspace=16)),
        RunSpec(model=ModelSpec(subspace=8)),
    ]
    assert len({encode_spec(spec) for spec in specs}) == len(specs)
    assert [decode_spec(encode_spec(spec)) for spec in specs] == specs


def test_a_text_that_says_nothing_new_is_named_as_before() -> None:
    """Its bytes, and so its run's id, have nothing of chats, masks or several sources."""
    tables = msgspec.msgpack.decode(encode_spec(RunSpec()))
    assert set(tables["data"]) == {"source", "validation_fraction", "digest"}


def test_chats_mask_documents_unless_it_is_said_otherwise() -> None:
    chat, text = SourceSpec(source="a", format="chat"), SourceSpec(source="b")
    assert not DataSpec().masks_documents
    assert not DataSpec().leaves_out_targets
    assert DataSpec(format="chat").masks_documents
    assert DataSpec(sources=(text, chat)).masks_documents
    assert not DataSpec(sources=(text, chat), document_masks=False).masks_documents
    assert DataSpec(sources=(text, chat), document_masks=False).leaves_out_targets
    assert DataSpec(document_masks=True).leaves_out_targets


def test_each_of_several_sources_is_like_a_spec_of_its_own() -> None:
    sources = (SourceSpec(source="a", format="chat"), SourceSpec(source="b", field="story", tokens_max=9))
    each = DataSpec(sources=sources, tokenizer="x.json").each
    assert [(one.source, one.format, one.field, one.tokens_max) for one in each] == [
        ("a", "chat", "text", 0), ("b", "text", "story", 9),
    ]  # fmt: skip
    assert all(one.tokenizer == "x.json" and one.masks_documents and not one.sources for one in each)
    assert DataSpec(sources=sources).found_at(("c", "d")).named == "c, d"
    assert DataSpec(sources=sources, digest="aa+bb").digests == ("aa", "bb")
    assert DataSpec().digests == ()
    full = tuple(SourceSpec(source="/" + "x" * 200, format="chat", weight=1 / 3, tokens_max=10**9) for _ in range(16))
    assert (
        len(encode_spec(RunSpec(data=DataSpec(sources=full, digest="+".join(["0" * 64] * 16))))) < RECORD_BYTES_MAX / 2
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sources": [{"source": "a"}], "source": "b"}, "source means nothing beside sources: say it there"),
        ({"sources": [{"source": "a"}], "tokens_max": 3}, "tokens_max means nothing beside sources"),
        ({"sources": [{"source": "a", "weight": 0}]}, "weight must be positive, is 0"),
        ({"sources": [{"source": ""}]}, "source and field must not be empty"),
        ({"sources": [{"source": "a"}] * 17}, "at most 16 sources, not 17"),
        ({"format": "poem"}, "Invalid enum value 'poem'"),
    ],
)
def test_sources_that_contradict_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=sentence):
        msgspec.convert(changes, DataSpec)


def test_initial_weights_need_a_digest_of_every_layer() -> None:
    with pytest.raises(ValueError, match=r"7 entries for 8 layers"):
        RunSpec(initial=InitialSpec(source="/weights", digests=("00",) * 7))
    with pytest.raises(ValueError, match="come together"):
        InitialSpec(source="/weights")


# --- experts ---


def test_a_dense_run_is_named_as_before_there_were_experts() -> None:
    """Its bytes, and so its id, have nothing of them."""
    tables = msgspec.msgpack.decode(encode_spec(RunSpec()))
    later = {"num_experts", "experts_per_token", "router_aux_loss", "head_size", "decoder", "tied", "subspace"}
    assert list(tables["model"]) == [name for name in ModelSpec.__struct_fields__ if name not in later]
    assert not {"expert_slots", "expert_replicas"} & set(tables["swarm"])
    assert msgspec.convert(tables, RunSpec) == RunSpec()
    model = ModelSpec(num_experts=4, experts_per_token=1, router_aux_loss=0.0)
    spec = RunSpec(model=model, swarm=SwarmSpec(expert_slots=2, expert_replicas=3))
    assert decode_spec(encode_spec(spec)) == spec
    assert run_id(spec, PeerID("owner")) != run_id(RunSpec(), PeerID("owner"))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_experts": -1}, "num_experts must be in"),
        ({"num_experts": 5000}, "num_experts must be in"),
        ({"num_experts": 4, "experts_per_token": 5}, "experts_per_token must be in"),
        ({"num_experts": 4, "experts_per_token": 0}, "experts_per_token must be in"),
        ({"num_experts": 4, "router_aux_loss": -0.1}, "router_aux_loss must not be negative"),
        ({"experts_per_token": 1}, "experts_per_token means nothing in a dense model"),
        ({"router_aux_loss": 0.5}, "router_aux_loss means nothing in a dense model"),
    ],
)
def test_experts_that_cannot_be_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ModelSpec(**fields)


def test_a_term_in_which_no_loss_could_be_found_is_refused() -> None:
    assert SwarmSpec(heartbeat_s=2.0, term_s=8.0)
    with pytest.raises(ValueError, match=r"at least 4 heartbeats, is 3\.5"):
        SwarmSpec(heartbeat_s=2.0, term_s=7.0)


def test_a_run_without_adapters_is_the_run_that_it_was() -> None:
    owner = PeerID("12D3KooWEhZ33xezv55Bcjsts9x15QxQZHNLbhTgVoadt5aXbTAv")
    adapted = RunSpec(adapter=AdapterSpec(kind="lora"))
    assert b"adapter" not in encode_spec(RunSpec())
    assert decode_spec(encode_spec(adapted)) == adapted
    assert run_id(adapted, owner) != run_id(RunSpec(), owner)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("rank = 4", "adapter.* kind is missing"),
        ('kind = "prefix"', r"adapter.kind cannot be 'prefix': it is one of lora, dora"),
        ('kind = "lora"\nrank = 0', "rank must be positive, is 0"),
        ('kind = "lora"\ntargets = ["lm_head"]', r"targets has .'lm_head'.: a decoder layer has q_proj"),
        ('kind = "lora"\nrank = 999', "adapter.rank 999 is more than model.dim 128"),
        ('kind = "lora"\nalpha = -1', "alpha must be positive"),
        ('kind = "lora"\ntargets = ["query"]', r"targets has .'query'.: a decoder layer has q_proj, k_proj"),
        ('kind = "lora"\ntargets = []', "targets is empty"),
        ('kind = "lora"\ntargets = ["q_proj", "q_proj"]', "names a matrix twice"),
        ('kind = "lora"\nbase = "int3"', r"adapter.base cannot be 'int3': it is one of fp32, bf16, int8, nf4"),
        ('kind = "lora"\ntargets = ["up_proj"]\n[model]\nnum_experts = 4', "up_proj belongs to the experts"),
        ('kind = "lora"\n[model]\nnum_experts = 4\n[swarm]\nexpert_slots = 2', r"swarm.expert_slots .* of the two out"),
    ],
)
def test_what_is_wrong_with_an_adapter_is_said_in_one_line(tmp_path: Path, lines: str, complaint: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[adapter]\n{lines}\n")
    with pytest.raises(SpecError, match=complaint) as raised:
        load_spec(path)
    assert "\n" not in str(raised.value)


# --- a subspace ---


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("subspace = -1", r"\[model\] subspace must be in \[1, 127\], less than dim, or 0 for none; it is -1"),
        ("subspace = 128", r"\[model\] subspace must be in \[1, 127\], less than dim, or 0 for none; it is 128"),
        ("subspace = 8.5", "model.subspace must be a whole number, not a fraction"),
        ('subspace = "D/8"', "model.subspace must be a whole number, not a text in quotes"),
        ("subspace = true", "model.subspace must be a whole number"),
        ("subspace = 8\ntied = true", "cannot be tied: leave subspace or tied out"),
        ('subspace = 8\n[model.decoder]\nnorms = "post"', r"subspace is for layers .* decoder.norms adds more"),
        ("subspace = 8\n[model.decoder]\nmlp_bias = true", r"subspace is for layers .* decoder.mlp_bias adds more"),
        ('subspace = 8\n[model.decoder]\nattention_bias = "all"', "decoder.attention_bias adds more"),
        ("subspace = 8\n[model.decoder]\nscale_embedding = true", "decoder.scale_embedding adds more"),
        ('subspace = 8\n[adapter]\nkind = "lora"', r"trains all weights, and \[adapter\] freezes them"),
        ("subspace = 8\nnum_experts = 4\n[swarm]\nexpert_slots = 2", "leave swarm.expert_slots out"),
    ],
)
def test_what_is_wrong_with_a_subspace_is_said_in_one_line(tmp_path: Path, lines: str, complaint: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"[model]\n{lines}\n")
    with pytest.raises(SpecError, match=complaint) as raised:
        load_spec(path)
    assert "\n" not in str(raised.value)


def test_weights_that_are_there_already_have_no_subspace(tmp_path: Path) -> None:
    digests = "[" + ", ".join(['"00"'] * 8) + "]"
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nsubspace = 8\n[initial]\nsource = "model"\ndigests = {digests}\n')
    with pytest.raises(SpecError, match=r"begins from its seed, .* leave model\.subspace out"):
        load_spec(path)


def test_families_whose_layers_write_products_alone_may_have_a_subspace() -> None:
    llama, qwen = ModelSpec(subspace=127), ModelSpec(subspace=1, decoder=DecoderSpec(attention_bias="qkv"))
    assert (llama.written_width, qwen.written_width, ModelSpec().written_width) == (127, 1, 128)
    assert llama.whole == ModelSpec()
    assert qwen.family == "qwen2"


@pytest.mark.parametrize(
    ("data", "subspace", "words"),
    [
        (DataSpec(), 0, 4 * 256),
        (DataSpec(), 8, 4 * 256 + 4),
        (DataSpec(document_masks=True), 0, 4 * 256 + 1),
        (DataSpec(document_masks=True), 8, 2 * 4 * 256 + 1),
    ],
)
def test_tokens_travel_only_where_they_do_not_follow_from_the_targets(
    data: DataSpec, subspace: int, words: int
) -> None:
    spec = RunSpec(model=ModelSpec(subspace=subspace), data=data)
    assert (spec.training.microbatch_size, spec.model.context) == (4, 256)
    assert spec.labels_bytes == 4 * words


def test_a_microbatch_may_be_larger_where_fewer_numbers_travel() -> None:
    training = TrainingSpec(microbatch_size=512)
    wide = ModelSpec(dim=4096, num_heads=32, num_kv_heads=8, context=256)
    with pytest.raises(ValueError, match="makes activations of 1024 MiB"):
        RunSpec(model=wide, training=training)
    assert RunSpec(model=msgspec.structs.replace(wide, subspace=512), training=training)


def test_adapters_take_ten_times_the_rate_at_which_all_weights_are_tuned(tmp_path: Path) -> None:
    digests = "[" + ", ".join(['"00"'] * 8) + "]"
    begins = f'[initial]\nsource = "model"\ndigests = {digests}\n'
    (tmp_path / "all.toml").write_text(begins)
    (tmp_path / "lora.toml").write_text(begins + '[adapter]\nkind = "lora"\n')
    tuned, adapted = (load_spec(tmp_path / f"{name}.toml").optimizer.learning_rate for name in ("all", "lora"))
    assert adapted == pytest.approx(10 * tuned, rel=0.05)


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\x00b", "a\u202eb"])
def test_a_name_that_would_act_on_a_terminal_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.toml").write_text(f"name = {json.dumps(name)}\n")
    with pytest.raises(SpecError, match="name has a control character or a line break: 'a") as raised:
        load_spec(tmp_path / "run.toml")
    assert str(raised.value).isprintable()
    table = msgspec.msgpack.decode(encode_spec(RunSpec())) | {"name": name}
    with pytest.raises(SpecError, match="name has a control character"):
        decode_spec(msgspec.msgpack.encode(table))
