"""`shoal import`: makes a run from existing weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from shoal.deploy.base.disk_error import or_say
from shoal.deploy.base.words import number_of_stages
from shoal.deploy.commands.options import (
    Json,
    Verbose,
    check_writable,
    data_source,
    examples,
    said_stages,
    start_logging,
)
from shoal.deploy.run.run_file import write_spec
from shoal.deploy.terminal.plain import say_result
from shoal.protocol.errors import LocalError
from shoal.protocol.layers import all_layer_keys
from shoal.protocol.spec import AdapterSpec, RunSpec
from shoal.protocol.toml.spec_file import convert_spec, load_spec, read_tables


@examples(
    "shoal import ./Llama-3.2-1B run.toml --data ./stories.jsonl  # then: shoal host run.toml",
    "shoal import ./Qwen3-0.6B run.toml --lora 16 --data chats.jsonl --format chat  # teach it answers",
    "shoal import ./my-model run.toml --spec base.toml  # steps, rate and stages as in base.toml",
    "shoal import ./SmolLM2-135M run.toml --untie  # its head is the embedding: make it a layer of its own",
    "shoal import ./Llama-3.1-8B run.toml --lora 16 --base nf4  # adapters beside weights in 4 bits, 4.8 GB in all",
    "shoal import ./my-model run.toml --context 512 --stages 2  # shorter samples, two stages at most",
)
def import_(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="The model's folder, with config.json, *.safetensors and tokenizer.json."
        ),
    ],
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run spec to write, for `shoal host`.")],
    data: Annotated[
        str, typer.Option(help="What to train on: a path, or hf:NAME. RUN.toml explains the details.")
    ] = "",
    format: Annotated[
        Literal["text", "chat"] | None,
        typer.Option(help="text: learn all of it. chat: learn only the answers in conversations."),
    ] = None,
    spec: Annotated[
        Path | None, typer.Option(help="A run spec with the settings that FOLDER does not contain.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Number of tokens in a sample. Default: at most 1,024.")
    ] = None,
    stages: Annotated[
        str,
        typer.Option(metavar="N|auto", help="Largest number of pipeline stages. Default: as many as suit the peers."),
    ] = "",
    untie: Annotated[
        bool,
        typer.Option(
            help="If the head and the embedding are one matrix: train the head as a layer of its own, "
            "which starts as a copy."
        ),
    ] = False,
    lora: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="RANK",
            help="Train adapters of this rank and leave the weights as they are. 0: train the weights.",
        ),
    ] = 0,
    dora: Annotated[
        bool, typer.Option("--dora", help="With --lora: also train the magnitudes of rows (DoRA).")
    ] = False,
    base: Annotated[
        Literal["fp32", "bf16", "int8", "nf4"], typer.Option(help="With --lora: how the weights are stored and sent.")
    ] = "bf16",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make a run spec with a model's weights as initial weights."""
    begun = load_spec(spec) if spec else None
    if run_toml.exists():
        raise LocalError(f"{run_toml} is there already: name a file that is not")
    check_writable(run_toml)
    source = data_source(data)
    chosen = said_stages(stages) if stages else None
    if base != "bf16" and not lora and (begun is None or begun.adapter is None):
        raise LocalError(f"--base {base} is for weights that stay as they are: say --lora RANK, too")
    if dora and not lora:
        raise LocalError("--dora is a kind of adapter: say --lora RANK, too")
    kind: Literal["lora", "dora"] = "dora" if dora else "lora"
    adapter = AdapterSpec(kind=kind, rank=lora, alpha=2.0 * lora, base=base) if lora else None
    start_logging(verbose)
    from shoal.deploy.run.run_text import load_own_corpus, text_in_words
    from shoal.deploy.ship.import_model import has_tied_head, import_model
    from shoal.deploy.terminal.progress import progress_bar
    from shoal.peer.data.corpus import Corpus
    from shoal.peer.data.microbatch import passes
    from shoal.peer.model.layout import num_parameters

    looked: list[Corpus] = []

    def steps_of(run: RunSpec) -> int:
        run, corpus = load_own_corpus(run)
        looked.append(corpus)
        # Three data passes: fine-tuning usually takes one to three.
        return max(1, round(run.training.steps * 3 / max(passes(corpus, run))))

    with progress_bar("reading the weights") as tell:
        made = import_model(
            folder,
            base=begun,
            source=source,
            format=format,
            context=context,
            stages=chosen,
            untie=untie,
            adapter=adapter,
            steps_of=steps_of if source or begun is not None else None,
            on_progress=tell,
        )
    if spec is not None:
        made = _fitted(made, spec)
    with or_say(f"cannot write {run_toml}"):
        write_spec(made, run_toml, _comments(made))
    said = {"run_toml": str(run_toml), "parameters": num_parameters(made.model), "spec": made}
    said["untied"] = untied = has_tied_head(folder) and not made.model.tied
    text = text_in_words(made, looked[0]) if looked else ()
    say_result(said, _in_words(made, run_toml, untied=untied, text=text), as_json=json)


def _in_words(made: RunSpec, run_toml: Path, *, untied: bool, text: Sequence[str]) -> Iterator[str]:
    """Yield sentences about the run. Args: text: sentences about the run's text; empty: the text is the default one."""
    from shoal.peer.model.layout import num_parameters
    from shoal.protocol.tensors import model_bytes, state_elements

    model, adapter, steps = made.model, made.adapter, made.training.steps
    mlp = f"{model.num_experts} experts a layer" if model.num_experts else "dense"
    yield (
        f"{num_parameters(model):,} parameters in {model.num_layers} layers, {mlp}, "
        f"{model.vocab_size:,} tokens, context {model.context}"
    )
    if model.tied:
        how = "adapters leave both as they are" if adapter else "both ends of the pipeline hold it"
        yield f"its embedding and head are one matrix and stay so: {how}, and it counts once"
    elif untied:
        yield (
            "its embedding and head were one matrix and are two from now on: the head begins as a copy, with "
            f"{model.vocab_size * model.dim:,} parameters of its own, and `shoal export` says "
            "tie_word_embeddings = false"
        )
    if adapter is not None:
        trained = sum(state_elements(made, key) for key in all_layer_keys(model))
        of_what = ", the attention's; experts and routers stay as they are" if model.num_experts else ""
        yield (
            f"{trained:,} parameters train, in adapters of rank {adapter.rank}{of_what}; the model's own stay, as "
            f"{model_bytes(model, adapter.base) / 1e6:,.1f} MB of {adapter.base} over all stages"
        )
    cut = number_of_stages(made.swarm.stages)
    yield f"{made.data.named} in {cut}; the weights stay in {made.initial.source}"
    yield from text
    if text:
        yield f"{steps:,} steps of {made.tokens_per_step:,} tokens are {steps * made.tokens_per_step:,} tokens"
    else:
        yield f"without --data it learns the sources of Python's own library: data.source in {run_toml} says so"
    yield f"look through {run_toml}, then: shoal host {run_toml}"


def _comments(made: RunSpec) -> dict[str, str]:
    rate = f"{made.optimizer.learning_rate:g}"
    return {
        "data.source": "a file, a folder or hf:NAME",
        "training.steps": f"{made.training.steps * made.tokens_per_step:,} tokens in all",
        "training.microbatches_per_step": "a step has this many times microbatch_size samples",
        "swarm.min_peers": "the run begins with this many peers",
        "optimizer.name": f"at a learning_rate of {rate} unless a line here says another",
        "model.context": "tokens of a sample",
    }


def _fitted(made: RunSpec, base: Path) -> RunSpec:
    """Return the spec `made`, with the optimizer and training fields that `base` leaves out computed for this model."""
    read = {name: msgspec.to_builtins(getattr(made, name)) for name in ("model", "swarm", "initial", "adapter")}
    fitted, _ = convert_spec(read_tables(base) | read, name=str(base))
    return msgspec.structs.replace(made, optimizer=fitted.optimizer, training=fitted.training)
