"""`shoal host`, `shoal continue` and `shoal join`: take part in a run."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.base.words import file_name
from shoal.deploy.commands.addresses import announced_addresses, listen_addresses
from shoal.deploy.commands.doctor import explain
from shoal.deploy.commands.options import (
    DEFAULT_LISTEN,
    Dashboard,
    Device,
    Devices,
    Limit,
    Listen,
    LocalText,
    PeerName,
    StateDir,
    Verbose,
    data_source,
    examples,
    grouped,
    start_logging,
)
from shoal.deploy.commands.running import given_invite
from shoal.deploy.dashboard.address import Address, parse_address
from shoal.deploy.manners.asking import ask, may_ask
from shoal.deploy.manners.config import load_settings
from shoal.deploy.manners.limits import Limits, with_overrides
from shoal.deploy.run.going_on import GoingOn, ended_in_words, going_on, new_run_note, same_run
from shoal.deploy.run.run_file import with_changes
from shoal.deploy.state import places
from shoal.deploy.state.run_folder import RunFolder, runs_in
from shoal.deploy.state.runs import find_hosted, hosted_names
from shoal.deploy.terminal.plain import say, say_or_report
from shoal.protocol.errors import RunNotFound
from shoal.protocol.identity import Identity
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.advice import advice
from shoal.protocol.toml.defaults import FilledField, in_words
from shoal.protocol.toml.spec_file import convert_spec, read_tables

Steps = Annotated[
    int | None, typer.Option(min=1, help="Total number of steps. If it is larger than before, the run continues to it.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """The options of every command that takes part in a run."""

    listen: Listen = DEFAULT_LISTEN
    announce: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address at which others reach this machine, if it cannot know it: a port that the router "
            "forwards.",
        ),
    ] = None
    state_dir: StateDir = None
    threads: Annotated[
        int,
        typer.Option(
            min=0, help="Number of threads for torch. 0: one for each core; a peer that joins leaves one core free."
        ),
    ] = 0
    dashboard: Dashboard = None
    limit: Limit = None
    record: Annotated[
        bool | None,
        typer.Option(
            "--record/--no-record",
            show_default=False,
            help="Keep a record of the run beside its snapshots: record.jsonl, and a file for TensorBoard. "
            "Default: as `shoal config` says; if it does not say, a host keeps one and a volunteer does not.",
        ),
    ] = None
    wandb: Annotated[
        str, typer.Option(metavar="PROJECT", help="Also send the record to this project at Weights & Biases.")
    ] = ""
    verbose: Verbose = False
    reports: Annotated[
        bool,
        typer.Option("--json", "--reports", help="Say what happens as JSON lines, for a script or a parent process."),
    ] = False

    def records(self, *, default: bool) -> tuple[bool, str]:
        """Return (True to keep a record of the run, the project at Weights & Biases or empty). The command's options
        override the settings. A project implies a record; if nothing says whether to keep one, `default` decides.

        Raises: LocalError: the package for Weights & Biases is missing.
        """
        settings = load_settings().record
        project = self.wandb or ("" if self.record is False else settings.wandb_project)
        if project:
            from shoal.deploy.record.exports import need_wandb

            need_wandb()
        wanted = next(choice for choice in (self.record, settings.keep_record, default) if choice is not None)
        return bool(project) or wanted, project

    def shown(self) -> Address | None:
        """Return the address at which to serve the dashboard; None: serve none."""
        return parse_address(self.dashboard) if self.dashboard else None

    def limits(self) -> Limits:
        """Return the owner's limits as they are set now."""
        return with_overrides(load_settings().limits, self.limit or [])


@examples(
    "shoal host run.toml  # start a run, print its invite, take part",
    "shoal host run.toml --steps 2000  # continue the same run, to step 2000",
    "shoal host run.toml --listen :4001 --announce 84.12.33.7:4001  # on a port that the router forwards",
    "shoal host run.toml --dashboard  # and open http://127.0.0.1:8640/ to see it",
    "shoal host run.toml --wandb my-project  # the record at Weights & Biases, too",
    "shoal host run.toml --device cuda:1 --state-dir /data/run  # another GPU, another disk",
)
@grouped
def host(
    run_toml: Annotated[
        Path,
        typer.Argument(metavar="RUN.toml", help="The run spec: a TOML file that describes model, text and training."),
    ],
    steps: Steps = None,
    name: PeerName = "host",
    device: Device = "auto",
    *,
    part: PartOptions,
) -> None:
    """Start or continue a run: print an invite, and take part."""
    spec, choices = convert_spec(read_tables(run_toml), name=str(run_toml))
    _host(_Asked(spec=spec, choices=choices, steps=steps), name, device, part)


@examples(
    "shoal continue notes --steps 2000  # a finished run, to step 2000",
    "shoal continue 3f0c  # a stopped one, where it was; the first letters of its id are enough",
)
@grouped
def continue_(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run's name, its id, or the first letters of its id.", autocompletion=hosted_names
        ),
    ],
    steps: Steps = None,
    name: PeerName = "host",
    device: Device = "auto",
    *,
    part: PartOptions,
) -> None:
    """Continue a run that was hosted on this machine."""
    folder, spec = find_hosted(run, part.state_dir)
    _host(_Asked(spec=spec, known=folder, steps=steps), name, device, replace(part, state_dir=folder.peer_folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    spec: RunSpec
    choices: tuple[FilledField, ...] = ()
    """The fields of the spec that the run file leaves out, so that a rule filled them in."""
    known: RunFolder | None = None
    """The folder of the run to continue; None: the run was given by a run file."""
    steps: int | None = None


@contextlib.contextmanager
def _starting(part: PartOptions) -> Iterator[None]:
    """Start logging, allow enough open files, and show a spinner inside the context, where the caller imports torch."""
    start_logging(part.verbose or part.reports)
    from shoal.deploy.session.heap import importing
    from shoal.deploy.session.open_files import allow_open_files
    from shoal.deploy.terminal.progress import sign_of_life

    allow_open_files()
    with sign_of_life("starting"), importing():
        yield


def _host(asked: _Asked, name: str, device: str, part: PartOptions) -> None:
    records, project = part.records(default=True)
    shown, limits = part.shown(), part.limits()
    with _starting(part):
        from shoal.deploy.manners.device import check_machine, own_threads, pick_device
        from shoal.deploy.run.run_text import load_own_corpus, text_in_words
        from shoal.deploy.session.session import Options, RecordChoice, Ways, host_run
        from shoal.deploy.ship.import_model import open_initial
        from shoal.deploy.terminal.progress import progress_bar
        from shoal.peer.data.microbatch import passes
        from shoal.protocol.live.loop import run

    picked = pick_device(device)
    check_machine(limits, picked, part.threads)
    folder = places.claim_folder(part.state_dir or places.state_root() / "hosts" / file_name(asked.spec.name))
    with _where_it_was_hosted(asked.known), contextlib.ExitStack() as unless_it_begins:
        unless_it_begins.callback(folder.release)
        spec, corpus = load_own_corpus(asked.spec)
        going = _goes_on(replace(asked, spec=spec), folder.path)
        if going.finished:
            _tell_finished(going.sentences, folder.path, reports=part.reports)
            return
        spec = going.spec
        warnings: Sequence[str] = ()
        said: tuple[str, ...] = ()
        if going.is_new:  # once a run has begun, none of this can change
            # Of several sources count the one that is read most often: the model memorises it first.
            tokens = spec.training.steps * spec.tokens_per_step / max(passes(corpus, spec))
            warnings = advice(spec, training_tokens=round(tokens), text_vocab_size=corpus.vocab_size)
            said = text_in_words(spec, corpus)
        with progress_bar("checking the weights") as tell:
            initial = open_initial(spec, tell)
        unless_it_begins.pop_all()
    chosen = Options(
        name=name,
        folder=folder.path,
        ways=Ways(listen=listen_addresses(part.listen), announce=announced_addresses(part.announce or ())),
        threads=part.threads or own_threads(),
        device=picked,
        reports=part.reports,
        limits=limits,
        reread_limits=part.limits,
        records=RecordChoice(keeps=records, wandb=project),
        dashboard=shown,
        first_said=(*going.sentences, *said, *(f"warning: {line}" for line in warnings)),
    )
    run(host_run(spec, corpus, initial, chosen))


def _goes_on(asked: _Asked, peer_folder: Path) -> GoingOn:
    others = runs_in(peer_folder)
    chosen = [choice.field for choice in asked.choices]
    same = (run for run in others if (spec := run.spec()) is not None and same_run(asked.spec, spec, chosen))
    found = asked.known or next(same, None)
    if found is not None:
        return going_on(asked.spec, found, steps=asked.steps)
    spec = asked.spec if asked.steps is None else with_changes(asked.spec, {"training.steps": asked.steps})
    note = new_run_note(spec, others, chosen)
    return GoingOn(spec=spec, sentences=(*((note,) if note else ()), *in_words(asked.choices, spec)), is_new=True)


def _tell_finished(sentences: Sequence[str], peer_folder: Path, *, reports: bool) -> None:
    from shoal.deploy.record.report import Left, write_report

    say_or_report(sentences, reports=reports)
    if reports:
        me = Identity.load_or_create(peer_folder / "identity.key").peer_id
        write_report(Left(peer=me, state_dir=str(peer_folder), finished=True))


def _where_it_was_hosted(known: RunFolder | None) -> contextlib.AbstractContextManager[None]:
    """Change to the host's former working directory, to which paths in its run file are relative."""
    standing = known.standing() if known is not None else None
    if standing is None or not Path(standing.directory or "?").is_dir():
        return contextlib.nullcontext()
    return contextlib.chdir(standing.directory)


@examples(
    "shoal join shoal1…  # take part, with the first GPU or the CPU",
    "shoal join shoal1… --name bob --device cuda:1  # as bob, with the second GPU",
    "shoal join shoal1… --device all  # with all GPUs, a peer each",
    "shoal join shoal1… --limit upload_mbit_s=5 --limit only_when_idle=true  # and not everything it has",
    "shoal join shoal1… --data ~/corpus.txt  # with the text of the run: the first stage needs it",
    "shoal join -  # paste the invite then: other users of this machine can read a command line",
)
@grouped
def join(
    invite: Annotated[
        str,
        typer.Argument(
            help="The invite that the host printed. Other users of this machine can read it in the list of "
            "processes; - reads it from standard input instead."
        ),
    ],
    name: PeerName = "volunteer",
    data: LocalText = "",
    tokenizer: Annotated[
        str, typer.Option(help="Where the run's tokenizer.json is on this machine, if the run uses one.")
    ] = "",
    base: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the model that the run's adapters belong to. Default: in the Hugging Face cache."
        ),
    ] = None,
    device: Devices = "auto",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask no questions; use the default for everything that is not set.")
    ] = False,
    *,
    part: PartOptions,
) -> None:
    """Take part in a run."""
    found = given_invite(invite) if invite != "-" or sys.stdin.isatty() else None
    text = ",".join(data_source(each) for each in data.split(",")) if not Path(data).exists() else data_source(data)
    records, project = part.records(default=False)
    shown = part.shown()
    if may_ask(answered=bool(part.limit) or yes or part.reports or invite == "-"):
        ask()

    def read_limits() -> Limits:
        return part.limits().of_a_volunteer

    limits = read_limits()
    with _starting(part):
        from shoal.deploy.manners.device import check_machine, devices_of, pick_device, spare_threads
        from shoal.deploy.session.session import Options, RecordChoice, TextPaths, Ways, join_run
        from shoal.protocol.live.loop import run

    if found is None:  # read after the imports: a parent starts this process before it has the invite
        found = given_invite(invite)
    addresses, told = listen_addresses(part.listen), announced_addresses(part.announce or ())
    if device == "all" or "," in device:
        from shoal.deploy.session.each_device import Each, join_with_each

        flags = [*_flag("--data", text), *_flag("--tokenizer", tokenizer), *_flag("--base", str(base or ""))]
        flags += ["--record" if records else "--no-record", *_flag("--wandb", project)]
        flags += [*(["--verbose"] if part.verbose else []), *(["--reports"] if part.reports else [])]
        first = [*_flag("--dashboard", part.dashboard or ""), *(f"--announce={way}" for way in part.announce or ())]
        each = Each(
            name=name, limits=limits, listen=addresses[0], state_dir=part.state_dir, threads=part.threads, flags=flags
        )
        devices = devices_of(device)
        raise typer.Exit(run(join_with_each(devices, found.encode(), each, first=first, plain=part.reports)))
    picked = pick_device(device)
    check_machine(limits, picked, part.threads)
    parent = places.state_root() / "runs" / found.run
    folder = places.claim_folder(part.state_dir) if part.state_dir else places.claim_first_free(parent, "peer")
    chosen = Options(
        name=name,
        folder=folder.path,
        ways=Ways(listen=addresses, announce=told),
        threads=part.threads or spare_threads(),
        device=picked,
        reports=part.reports,
        limits=limits,
        reread_limits=read_limits,
        records=RecordChoice(keeps=records, wandb=project),
        dashboard=shown,
        text=TextPaths(data=text, tokenizer=tokenizer, base=base),
    )
    try:
        run(join_run(found, chosen))
    except RunNotFound as error:
        folder.release()
        if finished := ended_in_words(RunFolder(folder.path, found.run)):
            say(finished, err=part.reports)
            return
        explain(error, found, listen=addresses, state_dir=folder.path, device=device)


def _flag(name: str, value: str) -> list[str]:
    return [f"{name}={value}"] if value else []
