"""`shoal tokenizer train`: makes a vocabulary for a run's text."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.commands.options import Json, check_writable, data_source, examples
from shoal.deploy.terminal.plain import say, say_result
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import DataSpec


@examples(
    "shoal tokenizer train stories.jsonl tokenizer.json  # 8,192 tokens, from the field text",
    "shoal tokenizer train python-library tokenizer.json --vocab-size 4096  # of what the demo reads",
    "shoal tokenizer train hf:roneneldan/TinyStories tokenizer.json --text-mb 200  # of a streamed data set",
)
def train(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="The text to learn from, written as `data.source` in a run spec.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.json", help="The tokenizer.json to write.")],
    vocab_size: Annotated[
        int, typer.Option(min=257, help="Number of tokens, with the 256 bytes and the end of text.")
    ] = 8192,
    field: Annotated[str, typer.Option(help="The field of a row or an example that contains the text.")] = "text",
    subset: Annotated[str, typer.Option(help="The subset, if the data set has several.")] = "",
    split: Annotated[str, typer.Option(help="The split of a data set.")] = "train",
    text_mb: Annotated[float, typer.Option(min=0.001, help="The largest amount of text to read, in MB.")] = 1000.0,
    json: Json = False,
) -> None:
    """Learn a byte-level BPE vocabulary from a text."""
    if out.exists():
        raise LocalError(f"{out} is there already: name a file that is not")
    check_writable(out)
    from shoal.deploy.terminal.progress import progress_bar
    from shoal.peer.data.account import Account
    from shoal.peer.data.documents import printable
    from shoal.peer.data.packing import training_texts
    from shoal.peer.data.tokenizer import FileTokenizer, train_bpe

    spec = DataSpec(source=data_source(source), field=field, subset=subset, split=split)
    account = Account()
    with progress_bar("reading the text") as tell:
        texts = training_texts(spec, bytes_max=int(text_mb * 1e6), account=account, on_progress=tell)
        data = train_bpe(texts, vocab_size)
    for sentence in account.sentences(printable(spec.source)):
        say(sentence, err=True)
    found = FileTokenizer(data, name=str(out)).vocab_size
    with or_say(f"cannot write {out}"):
        out.write_bytes(data)
    note = "" if found == vocab_size else f" (the text has no use for {vocab_size:,})"
    words = [
        f"{out}: {found:,} tokens{note}",
        f'in the run spec: vocab_size = {found} below [model], tokenizer = "{out.resolve()}" below [data]',
    ]
    say_result({"tokenizer": str(out.resolve()), "vocab_size": found}, words, as_json=json)
