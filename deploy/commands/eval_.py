"""`shoal eval`: evaluates a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.deploy.commands.model import Model
from shoal.deploy.commands.options import LocalText, data_source, examples, grouped, start_logging
from shoal.deploy.terminal.plain import say_result
from shoal.protocol.errors import LocalError

if TYPE_CHECKING:
    from shoal.deploy.ship.predictor import Predictor
    from shoal.deploy.ship.scores import Score


@examples(
    "shoal eval --data notes/  # the newest snapshot on this machine, on its run's validation set",
    "shoal eval ./my-model --text book.txt  # perplexity of an exported folder on a text",
    "shoal eval --tasks arc_easy,hellaswag --limit 200  # tasks of lm-eval (pip install lm-eval)",
    "shoal eval --swarm --data notes/  # the run that is up, through its stages: this machine needs no model",
    "shoal eval --data notes/ --base ./Llama-3.2-1B  # adapters, beside a model that this machine has elsewhere",
    "shoal eval --tasks my_task --include tasks/ --json  # of your own tasks, for a script",
)
@grouped
def eval_(
    data: LocalText = "",
    validation: Annotated[
        bool | None,
        typer.Option(help="Predict the run's validation set. Default: yes, unless --text or --tasks is given."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Number of validation samples of each source; 0: all.")] = 0,
    text: Annotated[
        list[Path] | None, typer.Option(help="Predict this text file, and say its perplexity. May be repeated.")
    ] = None,
    tasks: Annotated[str, typer.Option(metavar="NAME,…", help="Run these tasks of lm-eval.")] = "",
    include: Annotated[
        Path | None, typer.Option(help="A folder with tasks of your own, in the format of lm-eval.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Number of examples of each task; 0: all.")] = 0,
    shots: Annotated[int | None, typer.Option(min=0, help="Number of solved examples before each question.")] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, help="For a model's folder: how many tokens it reads at once. Default: at most 1,024."),
    ] = None,
    *,
    asked: Model,
) -> None:
    """Evaluate a snapshot or an exported model."""
    named = [name for name in tasks.split(",") if name]
    wants_validation = not (text or named) if validation is None else validation
    source = ",".join(data_source(part) for part in data.split(",")) if data else ""
    start_logging(asked.verbose)
    from shoal.deploy.ship.evaluation import text_score
    from shoal.deploy.ship.scores import in_words, keep_evaluation
    from shoal.deploy.terminal.progress import progress_bar

    if named:
        from shoal.deploy.ship.lm_tasks import check_library

        check_library()  # before minutes of other work

    def evaluate(predictor: "Predictor") -> None:
        scores: list[Score] = []
        if wants_validation:
            scores += _validation(predictor, source, asked.tokenizer, samples)
        for path in text or ():
            with progress_bar(f"reading {path.name}") as tell:
                scores.append(text_score(predictor, path, on_progress=tell))
        if named:
            from shoal.deploy.ship.lm_tasks import task_scores

            scores += task_scores(predictor, named, include=include, limit=limit, shots=shots)
        said: dict[str, object] = {"model": predictor.name, "scores": scores}
        words = [predictor.name, *(f"  {in_words(score)}" for score in scores)]
        if (origin := predictor.origin) is not None:
            keep_evaluation(origin.run, origin.era, origin.version, scores)
            said |= {"run": origin.run, "era": origin.era, "version": origin.version}
            words.append("`shoal export` writes these into the model's card")
        say_result(said, words, as_json=asked.json)

    asked.use("eval", evaluate, context=context, keeps_version=True)


def _validation(predictor: "Predictor", source: str, tokenizer: Path | None, samples: int) -> "list[Score]":
    from shoal.deploy.run.run_text import find_corpus
    from shoal.deploy.ship.evaluation import validation_scores
    from shoal.deploy.ship.scores import source_names
    from shoal.deploy.terminal.progress import progress_bar
    from shoal.peer.data.tokenizer import BYTES

    spec = predictor.spec
    if spec is None:
        raise LocalError(f"{predictor.name} does not say what it was trained on: name a text with --text, or --tasks")
    vocabulary = "" if spec.data.tokenizer == BYTES else str(tokenizer or spec.data.tokenizer)
    with progress_bar("reading the text") as tell:
        corpus = find_corpus(spec, data=source, tokenizer=vocabulary, on_progress=tell)
    if corpus is None:
        raise LocalError(f"the run's text is not known on this machine: name it with --data ({spec.data.named})")
    with progress_bar("predicting") as tell:
        names = source_names(spec.data)
        return validation_scores(predictor, corpus, names, samples_max=samples, on_progress=tell)
