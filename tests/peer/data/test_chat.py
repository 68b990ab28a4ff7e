"""Conversations become text as transformers writes it, and only their answers are learnt."""

import itertools
import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers

from shoal.peer.data.chat import CHATML, ChatTemplate, Message, load_template
from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.data.labels import IGNORED
from shoal.peer.data.microbatch import microbatch
from shoal.peer.data.tokenizer import train_bpe
from shoal.protocol.errors import DataError
from shoal.protocol.spec import DataSpec, ModelSpec, RunSpec, TrainingSpec

SYSTEM = {"role": "system", "content": "You are a größe fish."}
TALK = [
    SYSTEM,
    {"role": "user", "content": "What do you eat?"},
    {"role": "assistant", "content": "Plankton, mostly.\n"},
    {"role": "user", "content": "And today?"},
    {"role": "assistant", "content": "Nothing: 今日 is Friday."},
]
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
TOOLS = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}TOOLS {% endif %}"
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
) + CHATML
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A: {% generation %}{{ message['content'] }};"
    "{% endgeneration %}\n{% else %}Q: {{ message['content'] }}\n{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] }} {% elif loop.last %}"
    "[{{ m['content'] }}]{% else %}[{{ m['content'][:3] }}]{% endif %}{% endfor %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|begin|>"]


def messages(talk: list[dict[str, str]]) -> list[Message]:
    return [Message(role=one["role"], content=one["content"]) for one in talk]


def answers(source: str, talk: list[dict[str, str]]) -> list[str]:
    text, spans = ChatTemplate(source, {"bos_token": "<|begin|>"}, name="it").conversation(messages(talk))
    return [text[begin:end] for begin, end in spans]


@pytest.mark.parametrize(
    ("source", "learnt"),
    [
        (CHATML, ["Plankton, mostly.\n<|im_end|>\n", "Nothing: 今日 is Friday.<|im_end|>\n"]),
        (LLAMA3, ["Plankton, mostly.<|eot_id|>", "Nothing: 今日 is Friday.<|eot_id|>"]),
        (MARKED, ["Plankton, mostly.\n;", "Nothing: 今日 is Friday.;"]),
        (FORGETFUL, ["[Nothing: 今日 is Friday.]"]),
        (TOOLS, ["Plankton, mostly.\n<|im_end|>\n", "Nothing: 今日 is Friday.<|im_end|>\n"]),
    ],
    ids=["chatml", "llama 3", "marked", "forgetful", "tools"],
)
def test_what_is_learnt_is_what_the_assistant_writes_with_the_end_of_its_turn(source: str, learnt: list[str]) -> None:
    assert answers(source, TALK) == learnt


def test_a_template_is_told_that_there_are_no_tools_and_no_clock() -> None:
    text, _ = ChatTemplate(TOOLS, {}, name="it").conversation(messages(TALK[:2]))
    assert text.startswith("2024<|im_start|>system")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A vocabulary with special tokens and a chat template, as a model's folder has them."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "tokenizer.json").write_bytes(train_bpe([json.dumps(TALK, ensure_ascii=False)] * 3, 400))
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.add_special_tokens(SPECIAL)
    library.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|begin|>"},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": LLAMA3}))
    return path


@pytest.mark.parametrize("source", [LLAMA3, CHATML, MARKED], ids=["llama 3", "chatml", "marked"])
def test_tokens_and_what_is_learnt_of_them_are_those_of_transformers(folder: Path, tmp_path: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": TALK, "id": i}) + "\n" for i in range(2)))
    corpus = load_corpus(
        DataSpec(source=str(tmp_path / "chat.jsonl"), format="chat", tokenizer=str(folder / "tokenizer.json")),
        context=256,
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True)["input_ids"]
    assert corpus.text_N.tolist() == wanted * 2
    sample = corpus.samples(256).sample(0)
    learnt = [int(token) for token in sample.targets_T if token != IGNORED]
    assert theirs.decode(learnt) == "".join(answers(source, TALK))
    if source == MARKED:
        masks = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert learnt == [token for token, is_answer in zip(wanted, masks["assistant_masks"], strict=True) if is_answer]


def chats(tmp_path: Path, rows: list[object], **more: object) -> DataSpec:
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(source=str(tmp_path / "chat.jsonl"), format="chat", validation_fraction=0.2, **more)  # type: ignore[arg-type]


def learnt(corpus: Corpus, context: int) -> list[str]:
    """Of each sample, the text that is learnt."""
    found = []
    for validates in (False, True):
        samples = corpus.samples(context, validates=validates)
        for number in range(samples.count):
            sample = samples.sample(number)
            counted = sample.targets_T[sample.targets_T != IGNORED]
            assert len(counted) == samples.counted(number)
            found.append(bytes(counted.tolist()).decode())
    return found


def test_a_completion_is_learnt_with_the_end_of_its_text_and_a_prompt_is_not(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} + {i} = ", "completion": str(2 * i)} for i in range(50)]
    corpus = load_corpus(chats(tmp_path, rows), context=16)
    lines = "".join(learnt(corpus, 16)).splitlines()
    assert sorted(lines, key=int) == [str(2 * i) for i in range(50)]


def test_of_a_prompt_of_messages_only_the_completions_answers_are_learnt(tmp_path: Path) -> None:
    rows = [{"prompt": TALK[:4], "completion": [TALK[4]]}, {"prompt": "Who?", "completion": [TALK[2]]}]
    found = "".join(learnt(load_corpus(chats(tmp_path, rows), context=512), 512))
    assert sorted(found.split("<|im_end|>\n")) == ["", "Nothing: 今日 is Friday.", "Plankton, mostly.\n"]


def test_every_conversation_is_in_one_sample_whole_and_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"<{i}:", "completion": "x" * (i % 23) + ">"} for i in range(200)]
    context = 40
    corpus = load_corpus(chats(tmp_path, rows), context=context)
    found = []
    for validates in (False, True):
        samples = corpus.samples(context, validates=validates)
        for number in range(samples.count):
            sample = samples.sample(number)
            assert sample.begins_T is not None
            starts = [*sample.begins_T.nonzero().flatten().tolist(), context]
            for begin, end in itertools.pairwise(starts):
                text = bytes(sample.tokens_T[begin:end].tolist()).decode()
                if (sample.targets_T[begin:end] != IGNORED).any():
                    found.append(text)
                else:
                    assert not text.strip("\0")
    assert sorted(found) == sorted(row["prompt"] + row["completion"] for row in rows)
    assert corpus.packs is not None
    tokens = torch.cat([corpus.packs[0].sample(number).tokens_T for number in range(corpus.packs[0].count)])
    assert (tokens != 0).float().mean() > 0.97


def test_what_is_too_long_loses_its_end_and_what_has_no_answer_is_left_out(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": f"{i} ", "completion": "abc"} for i in range(40)]
    rows += [{"prompt": "long ", "completion": "y" * 100}, {"prompt": "z" * 100, "completion": "never seen"}]
    rows += [{"messages": TALK[:2]}]
    corpus = load_corpus(chats(tmp_path, rows), context=64)
    found = "".join(learnt(corpus, 64))
    assert found.count("abc\n") == 40
    assert found.count("y") == 64 - len("long ") + 1
    assert "never" not in found
    assert corpus.packs is not None
    assert sum(packs.num_shortened for packs in corpus.packs) == sum(packs.num_left_out for packs in corpus.packs) == 1
    assert corpus.account.sentences("it") == ("left out of it: 1 row: no answer to learn (line 43)",)
    assert corpus.learnt == len(found) / corpus.text_N.numel()


@pytest.mark.parametrize("source", [CHATML, MARKED], ids=["chatml", "marked"])
def test_a_message_with_a_weight_of_0_is_in_sight_and_not_learnt(source: str) -> None:
    weights = zip(TALK, (None, None, 0, None, 1.0), strict=True)
    talk = [Message(role=one["role"], content=one["content"], weight=weight) for one, weight in weights]
    template = ChatTemplate(source, {}, name="it")
    text, spans = template.conversation(talk)
    assert text == template.conversation(messages(TALK))[0]
    assert [text[begin:end] for begin, end in spans] == answers(source, TALK)[1:]


def test_microbatches_of_a_step_weigh_as_their_tokens(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i} ", "completion": "a" * (1 + i * 7 % 30)} for i in range(60)]
    data = chats(tmp_path, rows)
    training = TrainingSpec(microbatches_per_step=4, microbatch_size=2)
    spec = RunSpec(model=ModelSpec(context=32), data=data, training=training)
    corpus = load_corpus(data, context=32)
    for step in range(3):
        labels = [microbatch(corpus, spec, step, index)[1] for index in range(4)]
        counts = [int((one.targets_BT != IGNORED).sum()) for one in labels]
        assert [one.counted for one in labels] == counts
        assert [one.weight for one in labels] == pytest.approx([count * 4 / sum(counts) for count in counts])
        assert len(set(counts)) > 1


def test_a_text_beside_chats_is_learnt_whole_and_its_documents_do_not_see_each_other(tmp_path: Path) -> None:
    texts = [f"{i} fish\n" for i in range(80)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataSpec(source=str(tmp_path / "text.jsonl"), document_masks=True, validation_fraction=0.2)
    samples = load_corpus(data, context=20).samples(20)
    sample = samples.sample(1)
    assert sample.begins_T is not None
    text = bytes(sample.tokens_T.tolist())
    begins = {0, *(i + 2 for i in range(18) if text[i : i + 2] == b"\n\n")}  # its own end, and what stands behind it
    assert set(sample.begins_T.nonzero().flatten().tolist()) == begins
    crossed = [i for i in range(20) if sample.targets_T[i] == IGNORED]
    assert set(crossed) >= {i - 1 for i in begins if i > 0}
    assert samples.counted(1) == 20 - len(crossed)
    plain = load_corpus(DataSpec(source=str(tmp_path / "text.jsonl"), validation_fraction=0.2), context=20)
    assert plain.samples(20).sample(1).begins_T is None
    assert torch.equal(plain.samples(20).sample(1).tokens_T, sample.tokens_T)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for m in %}", "is not a chat template: "),
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses it: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "cannot write this: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "cannot write this: .*is not safely callable|unsafe"),
        ("{{ nothing.at.all }}", "cannot write this: 'nothing' is undefined"),
        ("{% for m in messages|reverse %}{{ m.content }}{% endfor %}", "does not write an answer after its own prompt"),
    ],
)
def test_a_template_that_is_none_is_one_clear_line(source: str, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        answers(source, TALK)


def test_a_vocabulary_without_a_template_is_told_where_it_belongs(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match=r"no chat template beside .*: put one there as chat_template\.jinja"):
        load_template(folder / "tokenizer.json")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_template(folder / "tokenizer.json").source == CHATML


def test_another_template_is_another_text(folder: Path, tmp_path: Path) -> None:
    data = chats(tmp_path, [{"messages": TALK}] * 4, tokenizer=str(folder / "tokenizer.json"))
    first = load_corpus(data, context=256, cache=tmp_path / "cache")
    assert load_corpus(data, context=256, cache=tmp_path / "cache").digest == first.digest
    (folder / "chat_template.jinja").write_text(CHATML)
    assert load_corpus(data, context=256, cache=tmp_path / "cache").digest != first.digest
