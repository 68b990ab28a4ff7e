"""`shoal host` and `shoal join`: take part in a run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy import places
from shoal.deploy.commands.options import (
    DEFAULT_LISTEN,
    Device,
    Listen,
    Reports,
    StateDir,
    Threads,
    Verbose,
    examples,
    start_logging,
)
from shoal.protocol.invite import parse_invite
from shoal.protocol.spec import load_spec


@examples(
    "shoal host run.toml  # start a run, print its invite, take part",
    "shoal host run.toml --listen :4001 --name alice  # on a port that the router forwards",
    "shoal host run.toml --device cuda:1 --state-dir /data/run  # another GPU, another disk",
)
def host(
    run_toml: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run spec (protocol/spec.py).")],
    name: Annotated[str, typer.Option(help="What others see.")] = "host",
    listen: Listen = DEFAULT_LISTEN,
    state_dir: StateDir = None,
    threads: Threads = 0,
    device: Device = "auto",
    verbose: Verbose = False,
    reports: Reports = False,
) -> None:
    """Start a run: print an invite, and take part."""
    spec = load_spec(run_toml)
    start_logging(verbose or reports)
    from shoal.deploy.session import Options, host_run, listen_addresses, load_own_corpus, pick_device
    from shoal.protocol.live.run import run

    spec, corpus = load_own_corpus(spec)
    folder = places.claim_folder(state_dir or places.state_root() / "hosts" / _file_name(spec.name))
    chosen = Options(
        name=name,
        folder=folder.path,
        listen=listen_addresses(listen),
        threads=threads,
        device=pick_device(device),
        reports=reports,
    )
    run(host_run(spec, corpus, chosen))


@examples(
    "shoal join shoal1…  # take part, with the first GPU or the CPU",
    "shoal join shoal1… --name bob --device cuda:1  # as bob, with the second GPU",
    "shoal join shoal1… --data ~/corpus.txt  # with the text of the run: the first stage needs it",
    "shoal join - < invite.txt  # the invite from standard input",
)
def join(
    invite: Annotated[str, typer.Argument(help="What the host printed; - reads it from standard input.")],
    name: Annotated[str, typer.Option(help="What others see.")] = "volunteer",
    listen: Listen = DEFAULT_LISTEN,
    state_dir: StateDir = None,
    data: Annotated[str, typer.Option(help="Where the run's text is on this machine.")] = "",
    threads: Threads = 0,
    device: Device = "auto",
    verbose: Verbose = False,
    reports: Reports = False,
) -> None:
    """Take part in a run."""
    found = parse_invite(invite) if invite != "-" else None
    start_logging(verbose or reports)
    from shoal.deploy.session import Options, join_run, listen_addresses, pick_device
    from shoal.protocol.live.run import run

    if found is None:  # after the imports: a parent starts us before it has the invite
        found = parse_invite(sys.stdin.readline())
    addresses = listen_addresses(listen)
    parent = places.state_root() / "runs" / found.run
    folder = places.claim_folder(state_dir) if state_dir else places.claim_first_free(parent, "peer")
    chosen = Options(
        name=name,
        folder=folder.path,
        listen=addresses,
        threads=threads,
        device=pick_device(device),
        reports=reports,
        data=data,
    )
    run(join_run(found, chosen))


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in text)
