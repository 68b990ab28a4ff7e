"""`shoal export`: writes the trained model for other tools."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.deploy.commands.options import Json, RunsBase, RunsTokenizer, Verbose, examples, start_logging
from shoal.deploy.terminal.plain import say_result
from shoal.protocol.errors import LocalError


@examples(
    "shoal export my-model  # the newest snapshot on this machine",
    "shoal export notes my-model  # of the run notes",
    "shoal export my-model --dtype bfloat16  # at half the size",
    "shoal export my-model --format hf  # of a run with adapters: merged into the model that they stand beside",
    "shoal export my-model --tokenizer tokenizer.json  # of a run with a vocabulary of its own",
)
def export(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] OUT",
            help="OUT: the folder to make. RUN: a run's name, id or folder, or a snapshot. "
            "Default: the run last used here.",
        ),
    ],
    format: Annotated[
        Literal["auto", "hf", "peft"],
        typer.Option(help="hf: a whole model for transformers, adapters merged into it. peft: adapters alone."),
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(help="The type of the weights in the files; training keeps float32."),
    ] = "float32",
    shard_gb: Annotated[float, typer.Option(min=0.001, help="The largest size of a file of weights, in GB.")] = 5.0,
    tokenizer: RunsTokenizer = None,
    base: RunsBase = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a snapshot for transformers, adapters for peft."""
    if len(words) > 2:
        raise LocalError("say at most two: a run, and the folder to make")
    *wanted, out = words
    start_logging(verbose)
    from shoal.deploy.ship.export import export as write
    from shoal.deploy.ship.found_snapshot import find_snapshots
    from shoal.deploy.terminal.progress import progress_bar

    snapshots = find_snapshots(*wanted)
    with progress_bar("writing") as tell:
        done = write(
            snapshots,
            Path(out),
            form=None if format == "auto" else format,
            dtype=dtype,
            base=base,
            shard_bytes=int(shard_gb * 1e9),
            tokenizer=tokenizer,
            on_progress=tell,
        )
    files = f"{done.shards} files" if done.shards > 1 else "one file"
    load = f"transformers.AutoModelForCausalLM.from_pretrained({done.folder!r})"
    if done.form == "peft":
        load = f"peft.PeftModel.from_pretrained(MODEL, {done.folder!r}), or --format hf merges it"
    words = [
        f"run {done.run}, version {done.version}: {done.parameters:,} parameters",
        f"{done.folder}: {done.bytes / 1e6:,.1f} MB of {dtype} in {files}",
        f"load it with {load}",
    ]
    say_result(done, words, as_json=json)
