"""`shoal generate`: generates text with the trained model."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.deploy.commands.model import Model
from shoal.deploy.commands.options import examples, grouped, start_logging
from shoal.deploy.terminal.plain import say, say_json
from shoal.protocol.errors import LocalError

if TYPE_CHECKING:
    from shoal.deploy.ship.predictor import Predictor


@examples(
    'shoal generate --prompt "def main("  # the newest snapshot on this machine',
    'shoal generate notes --prompt "Once" --tokens 500 --temperature 0.6  # the run notes; longer, and more careful',
    "shoal generate --prompt - < question.txt  # the prompt from a file",
    'shoal generate --swarm --prompt "Once"  # through the stages of the run that is up, which hold the model',
    'shoal generate --prompt "x = " --temperature 0 --json  # the likeliest text, for a script',
)
@grouped
def generate(
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="The text to continue; - reads it from standard input.")
    ] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="The largest number of tokens to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, help="How freely to choose; 0 always takes the likeliest token.")
    ] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Choose among the likeliest tokens that together have this probability.")
    ] = 0.95,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            show_default=False,
            help="Put the prompt into the model's chat template, and show the answer. "
            "Default: yes, if the run has learnt from chats.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed writes the same text. Default: a new one each time.")
    ] = None,
    *,
    asked: Model,
) -> None:
    """Generate text with a model, and show it as it comes."""
    start_logging(asked.verbose)
    from shoal.deploy.ship.generate import fit_for_terminal, manner_of, write
    from shoal.peer.model.generate import Sampler

    if prompt == "-":
        prompt = sys.stdin.read()
    seed = time.time_ns() % 2**32 if seed is None else seed
    try:
        sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
    except ValueError as error:
        raise LocalError(str(error)) from error

    def show(predictor: "Predictor") -> None:
        manner = manner_of(predictor, chat=chat, tokenizer=asked.tokenizer)
        parts = write(predictor, prompt, tokens, sampler, manner)
        if asked.json:
            text, origin = "".join(parts), predictor.origin
            said = {"model": predictor.name} if origin is None else {"run": origin.run, "version": origin.version}
            say_json({**said, "seed": seed, "prompt": prompt, "text": text})
            return
        shown = fit_for_terminal if sys.stdout.isatty() else str
        started_s, count = time.perf_counter(), 0
        sys.stdout.write(shown(prompt if manner.template is None else f"{prompt}\n"))
        for part in parts:
            sys.stdout.write(shown(part))
            sys.stdout.flush()
            count += 1
        sys.stdout.write("\n")
        pace = count / max(1e-9, time.perf_counter() - started_s)
        say(f"{predictor.name}, seed {seed}: {count} tokens, {pace:,.1f} a second", err=True)

    asked.use("generate", show)
