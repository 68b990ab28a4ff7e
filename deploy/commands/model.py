"""Opens the model that `shoal eval` and `shoal generate` work on: from this machine, or through a swarm's stages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.deploy.commands.options import Device, RunsBase, RunsTokenizer, Verbose
from shoal.deploy.commands.running import given_invite, running_invite
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import RunSpec

if TYPE_CHECKING:
    from shoal.deploy.ship.predictor import Predictor
    from shoal.peer.data.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The options of every command that works on a trained model."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="A run's name, id or folder; a snapshot; or a model's folder. Default: the run last used here.",
        ),
    ] = ""
    tokenizer: RunsTokenizer = None
    base: RunsBase = None
    swarm: Annotated[
        bool, typer.Option("--swarm", help="Use the model of a run that is up, where its peers hold it.")
    ] = False
    invite: Annotated[
        str | None,
        typer.Option(
            "--invite",
            metavar="INVITE",
            help="Use the model of this invite's run; - reads the invite from standard input. Default: the run that "
            "is up here.",
        ),
    ] = None
    device: Device = "auto"
    json: Annotated[bool, typer.Option("--json", help="Print everything at the end, as JSON.")] = False
    verbose: Verbose = False

    def use(
        self,
        command: str,
        work: "Callable[[Predictor], None]",
        *,
        context: int | None = None,
        keeps_version: bool = False,
    ) -> None:
        """Run `work` with the model.

        Args:
            context: the most tokens that a model from a folder reads at once; None: at most 1,024.
            keeps_version: through a swarm, use a single version; once that is lost, `work` starts again with the
                newest.
        Raises: LocalError: the model or the run cannot be found, or the run does not answer. DataError: there is no
        tokenizer.
        """
        from shoal.deploy.manners.device import pick_device, take_own_threads

        take_own_threads()
        if not (self.swarm or self.invite):
            from shoal.deploy.ship.loaded_model import load_model

            device = pick_device(self.device)
            work(load_model(self.model, device=device, tokenizer=self.tokenizer, base=self.base, context=context))
            return
        if self.model or self.base:
            raise LocalError("--swarm asks the stages of a run, which have the model: leave MODEL and --base out")
        found = given_invite(self.invite) if self.invite else running_invite(f"{command} --swarm --invite")
        from shoal.deploy.visitor.swarm_model import through_swarm
        from shoal.peer.data.tokenizer import load_tokenizer
        from shoal.protocol.live.loop import run

        def vocabulary(spec: RunSpec) -> "Tokenizer":
            return load_tokenizer(spec.data, path=self.tokenizer)

        run(through_swarm(found, work, tokenizer=vocabulary, keeps_version=keeps_version))
