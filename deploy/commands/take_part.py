"""`shoal host` and `shoal join`: take part in a run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy import places
from shoal.deploy.addresses import announced_addresses, listen_addresses
from shoal.deploy.commands.doctor import explain
from shoal.deploy.commands.options import (
    DEFAULT_LISTEN,
    Announce,
    Dashboard,
    Device,
    Limit,
    Listen,
    Record,
    Reports,
    StateDir,
    Threads,
    Verbose,
    Wandb,
    data_source,
    examples,
    start_logging,
)
from shoal.deploy.config import load_settings
from shoal.deploy.dashboard.address import parse_address
from shoal.deploy.manners.asking import ask, may_ask
from shoal.deploy.manners.limits import with_overrides
from shoal.protocol.advice import advice
from shoal.protocol.defaults import in_words
from shoal.protocol.errors import RunNotFound
from shoal.protocol.invite import parse_invite
from shoal.protocol.spec import convert_spec, read_tables


@examples(
    "shoal host run.toml  # start a run, print its invite, take part",
    "shoal host run.toml --listen :4001 --announce 84.12.33.7:4001  # on a port that the router forwards",
    "shoal host run.toml --dashboard  # and open http://127.0.0.1:8640/ to see it",
    "shoal host run.toml --wandb my-project  # the record at Weights & Biases, too",
    "shoal host run.toml --device cuda:1 --state-dir /data/run  # another GPU, another disk",
)
def host(
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run spec (protocol/spec.py).")],
    name: Annotated[str, typer.Option(help="What others see.")] = "host",
    listen: Listen = DEFAULT_LISTEN,
    announce: Announce = None,
    state_dir: StateDir = None,
    threads: Threads = 0,
    device: Device = "auto",
    dashboard: Dashboard = None,
    limit: Limit = None,
    record: Record = None,
    wandb: Wandb = "",
    verbose: Verbose = False,
    reports: Reports = False,
) -> None:
    """Start a run: print an invite, and take part."""
    spec, choices = convert_spec(read_tables(run_toml), name=str(run_toml))
    records = _records(record, wandb, default=True)
    shown = parse_address(dashboard) if dashboard else None
    limits = with_overrides(load_settings().limits, limit or [])
    start_logging(verbose or reports)
    from shoal.deploy.progress import progress_bar, sign_of_life

    with sign_of_life("starting"):
        from shoal.deploy.manners.device import pick_device
        from shoal.deploy.run_text import load_own_corpus
        from shoal.deploy.session import Options, host_run
        from shoal.deploy.ship.import_model import open_initial
        from shoal.protocol.live.run import run

    spec, corpus = load_own_corpus(spec)
    warnings = advice(spec, training_tokens=corpus.num_training, text_vocab_size=corpus.vocab_size)
    with progress_bar("checking the weights") as tell:
        initial = open_initial(spec, lambda done, layers: tell(done / layers))
    folder = places.claim_folder(state_dir or places.state_root() / "hosts" / _file_name(spec.name))
    chosen = Options(
        name=name,
        folder=folder.path,
        listen=listen_addresses(listen),
        announce=announced_addresses(announce or ()),
        threads=threads,
        device=pick_device(device),
        reports=reports,
        limits=limits,
        records=records,
        wandb=wandb,
        dashboard=shown,
        initial=initial,
        first_said=(*in_words(choices, spec), *(f"warning: {line}" for line in warnings)),
    )
    run(host_run(spec, corpus, chosen))


@examples(
    "shoal join shoal1…  # take part, with the first GPU or the CPU",
    "shoal join shoal1… --name bob --device cuda:1  # as bob, with the second GPU",
    "shoal join shoal1… --limit upload_mbit_s=5 --limit only_when_idle=true  # and not everything it has",
    "shoal join shoal1… --data ~/corpus.txt  # with the text of the run: the first stage needs it",
    "shoal join - < invite.txt  # the invite from standard input",
)
def join(
    invite: Annotated[str, typer.Argument(help="What the host printed; - reads it from standard input.")],
    name: Annotated[str, typer.Option(help="What others see.")] = "volunteer",
    listen: Listen = DEFAULT_LISTEN,
    announce: Announce = None,
    state_dir: StateDir = None,
    data: Annotated[str, typer.Option(help="Where the run's text is on this machine.")] = "",
    tokenizer: Annotated[str, typer.Option(help="Where its tokenizer.json is, if it has one.")] = "",
    threads: Threads = 0,
    device: Device = "auto",
    dashboard: Dashboard = None,
    limit: Limit = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: what is not set has its default.")] = False,
    record: Record = None,
    wandb: Wandb = "",
    verbose: Verbose = False,
    reports: Reports = False,
) -> None:
    """Take part in a run."""
    found = parse_invite(invite) if invite != "-" else None
    text = data_source(data)
    records = _records(record, wandb, default=False)
    shown = parse_address(dashboard) if dashboard else None
    if may_ask(answered=bool(limit) or yes or reports or invite == "-"):
        ask()
    limits = with_overrides(load_settings().limits, limit or []).of_a_volunteer
    start_logging(verbose or reports)
    from shoal.deploy.progress import sign_of_life

    with sign_of_life("starting"):
        from shoal.deploy.manners.device import pick_device, spare_threads
        from shoal.deploy.session import Options, join_run
        from shoal.protocol.live.run import run

    if found is None:  # after the imports: a parent starts us before it has the invite
        found = parse_invite(sys.stdin.readline())
    addresses, told = listen_addresses(listen), announced_addresses(announce or ())
    parent = places.state_root() / "runs" / found.run
    folder = places.claim_folder(state_dir) if state_dir else places.claim_first_free(parent, "peer")
    chosen = Options(
        name=name,
        folder=folder.path,
        listen=addresses,
        announce=told,
        threads=threads or spare_threads(),
        device=pick_device(device),
        reports=reports,
        limits=limits,
        records=records,
        wandb=wandb,
        dashboard=shown,
        data=text,
        tokenizer=tokenizer,
    )
    try:
        run(join_run(found, chosen))
    except RunNotFound as error:
        folder.release()
        explain(error, found, listen=addresses, state_dir=folder.path, device=device)


def _records(asked: bool | None, wandb: str, *, default: bool) -> bool:
    """Whether to keep a record. Raises: LocalError: the package for `--wandb` is missing."""
    if wandb:
        from shoal.deploy.record.wandb_run import need_wandb

        need_wandb()
    return bool(wandb) or (default if asked is None else asked)


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)
