"""A data-parallel trainer on `hivemind.Optimizer`: what a volunteer would train with otherwise. `peers.py` starts it.

Model, first weights, text, microbatches, optimizer and its schedule are those of the run file, by shoal's own code, so
that speed and loss can be compared; only the gradient's norm is not bounded. Every member holds the whole model and
averages gradients and, every ten steps, weights, in float16.

Each event is a line of JSON at its standard output. It waits for a line at its standard input three times:

    {"event": "up"}                      the text is read. A line: the address of a member, or empty for the first one.
    {"event": "here", "address": …}      others reach it. With --together a line: everybody begins now.
    {"event": "fetched", "seconds": …}   it has loaded somebody's state
    {"event": "step", "step": …, "loss": …, "samples": …, "members": …}
                                         its optimizer made a step: the mean loss of its own samples since the last one,
                                         how many those were, and how many members the gradient is the mean of

SIGKILL ends it with its processes; it never ends by itself.
"""

import argparse
import ctypes
import ipaddress
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from shoal.deploy.run.run_text import load_own_corpus
from shoal.peer.data.microbatch import microbatch
from shoal.peer.model.layout import initial_parameters, layer_layout
from shoal.peer.model.llama import loss_of_head, rotary_tables, run_layers
from shoal.peer.model.schedule import rate_of
from shoal.protocol.layers import HEAD, all_layer_keys
from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.spec_file import load_spec

MATCHMAKING_S = 2.0
AVERAGING_TIMEOUT_S = 120.0
STATE_EVERY = 10
_PR_SET_PDEATHSIG = 1


class Model(nn.Module):
    """The run's whole model, with the weights with which the run begins."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self._model, self._rotary = spec.model, rotary_tables(spec.model)
        self._keys = all_layer_keys(spec.model)
        self._layers = {}
        for key in self._keys:
            views = layer_layout(spec.model, key).views(initial_parameters(spec, key))
            self._layers[key] = {name: nn.Parameter(view.clone()) for name, view in views.items()}
            for name, parameter in self._layers[key].items():
                self.register_parameter(f"{key} {name}".replace(".", "_"), parameter)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTD = run_layers(self._model, self._keys[:-1], self._layers, tokens_BT, self._rotary)
        return loss_of_head(self._model, self._layers[HEAD], x_BTD, targets_BT)

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Matrices decay, norms do not."""
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        norms = [parameter for parameter in self.parameters() if parameter.ndim == 1]
        return [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]


def optimizer_of(spec: RunSpec) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    said = spec.optimizer
    common: dict[str, Any] = {"lr": said.learning_rate, "betas": (said.beta1, said.beta2), "eps": said.epsilon}
    if said.name == "nadam":
        return lambda groups: torch.optim.NAdam(groups, **common, decoupled_weight_decay=True, momentum_decay=math.inf)
    if said.name == "adamw":
        return lambda groups: torch.optim.AdamW(groups, **common)
    raise SystemExit(f"optimizer.name is {said.name}, and torch has no such one: take nadam or adamw")


def schedule_of(spec: RunSpec) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LambdaLR]:
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_of(spec, step) / spec.optimizer.learning_rate
    )


class Losses:
    """The mean loss of the samples since the last step."""

    def __init__(self, microbatch_size: int) -> None:
        self._microbatch_size, self._losses = microbatch_size, list[float]()

    def add(self, loss: Tensor) -> None:
        self._losses.append(loss.item())

    def tell(self, step: int, members: int) -> None:
        """Args: step: how many steps there were before this one."""
        losses, self._losses = self._losses, []
        mean = sum(losses) / len(losses) if losses else None
        tell("step", step=step, loss=mean, samples=len(losses) * self._microbatch_size, members=members)


def tell(event: str, **said: object) -> None:
    print(json.dumps({"event": event, **said}), flush=True)


def train_alone(spec: RunSpec, batch: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    model, losses = Model(spec), Losses(spec.training.microbatch_size)
    optimizer = optimizer_of(spec)(model.groups(spec.optimizer.weight_decay))
    schedule, per_step, step = schedule_of(spec)(optimizer), spec.training.microbatches_per_step, 0
    while True:
        for index in range(per_step):
            loss = model(*batch(step * per_step + index))
            (loss / per_step).backward()
            losses.add(loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.tell(step, members=1)
        step += 1


def train_with_others(
    spec: RunSpec, batch: Callable[[int], tuple[Tensor, Tensor]], *, initial: str, together: bool
) -> None:
    import hivemind
    from hivemind.compression import Float16Compression

    class Optimizer(hivemind.Optimizer):
        """Says when it fetches state, and how many members each gradient is the mean of."""

        members = 1

        def load_state_from_peers(self, **options: Any) -> None:
            began_s = time.monotonic()
            super().load_state_from_peers(**options)
            tell("fetched", seconds=time.monotonic() - began_s)

        def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
            super()._average_gradients_and_load_into_optimizer(control)
            failed = control is None or not control.done() or control.cancelled() or control.exception() is not None
            self.members = 1 if failed else len(control.result())

    address = own_address()
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{address}/tcp/0"],
        initial_peers=[initial] if initial else None,
        start=True,
        use_relay=False,
        use_auto_relay=False,
        force_reachability="public",
    )
    training, model, losses = spec.training, Model(spec), Losses(spec.training.microbatch_size)
    optimizer = Optimizer(
        dht=dht,
        run_id=spec.name,
        target_batch_size=training.microbatches_per_step * training.microbatch_size,
        batch_size_per_step=training.microbatch_size,
        params=model.groups(spec.optimizer.weight_decay),
        optimizer=optimizer_of(spec),
        scheduler=schedule_of(spec),
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=AVERAGING_TIMEOUT_S,
        grad_compression=Float16Compression(),
        state_averaging_compression=Float16Compression(),
        load_state_compression=Float16Compression(),
        average_state_every=STATE_EVERY,
    )
    tell("here", address=next(str(at) for at in dht.get_visible_maddrs() if address in str(at)))
    if together:
        sys.stdin.readline()
    elif initial:
        optimizer.load_state_from_peers()
    count, step = 0, optimizer.local_epoch
    while True:
        loss = model(*batch(count))
        loss.backward()
        losses.add(loss)
        before = step
        optimizer.step()
        optimizer.zero_grad()
        count, step = count + 1, optimizer.local_epoch
        if step > before:
            losses.tell(step - 1, members=optimizer.members)


def own_address() -> str:
    """This host's only address that others can reach, or that of the loopback."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family.name == "AF_INET" and not ipaddress.ip_address(each.address).is_loopback:
                return each.address
    return "127.0.0.1"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run file; without it the defaults of one")
    parser.add_argument("--member", type=int, default=0, help="its number: each trains on microbatches of its own")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--together", action="store_true", help="all begin at the same moment with equal weights")
    how.add_argument("--alone", action="store_true", help="without hivemind, and without a network")
    options = parser.parse_args()
    os.register_at_fork(after_in_child=_die_with_parent)
    torch.set_num_threads(1)
    spec, corpus = load_own_corpus(load_spec(options.run) if options.run else RunSpec())

    def batch(count: int) -> tuple[Tensor, Tensor]:
        """The member's microbatch number `count`: all that there are if it is alone, else one of each step's."""
        per_step = spec.training.microbatches_per_step
        step, index = divmod(count, per_step) if options.alone else (count, options.member % per_step)
        tokens_BT, labels = microbatch(corpus, spec, step, index)
        return tokens_BT, labels.targets_BT

    if not options.alone:
        import hivemind  # noqa: F401  seconds, before the invitation
    tell("up")
    initial = sys.stdin.readline().strip()
    if options.alone:
        train_alone(spec, batch)
    else:
        train_with_others(spec, batch, initial=initial, together=options.together)


if __name__ == "__main__":
    main()
