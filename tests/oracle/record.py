"""Plays what must stay equal while code moves, and writes down what came of it: one JSON line for each case.

    record.py OUT [--only SECTION[/CASE] ...] [--cases 2] [--jobs 1] [--full]

A line is `[section, case, items, seconds]`, and an item is a string. The items of a long case are a count and a hash;
with --full they are its events in order, so that two records show where they part. What follows a tab in an item is for
people, and is not compared. `oracle.py` plays this script in two commits, in each by the commit's own code: so the
arguments and the form of a line must stay as they are.

No name of a Python class or field is in an item. A message is what it is on the wire; any other value is its fields in
order, without those at their defaults, so that a new optional field changes nothing; a type of event or command is the
number of its first appearance in the case. Sentences in logs are not recorded. Reasons in plans and refusals are, since
they travel on the wire.
"""

import argparse
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from typer.testing import CliRunner

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("lib", "soak", "bench")]

import coordination as soak
from campaign_run import run_trial
from live.cases import SIX_EQUAL, case, coarser, with_steps
from live.growth import churn_of, swarm
from sample_networks import PAPER_STAGES, PAPER_WORKLOAD, paper_network
from sim_swarm import SimSwarm
from tiny_run import tiny_corpus, tiny_spec
from trial import CampaignOptions, draw_trial

import shoal.protocol
from shoal.coordinator.allocate.dtfm_search import plan_dtfm
from shoal.coordinator.allocate.evolution import WORK_PER_SECOND
from shoal.coordinator.allocate.planner import plan
from shoal.coordinator.coordination_events import Alarm, LogReason
from shoal.coordinator.core import CoordinationCore
from shoal.coordinator.cost.placement import Placement
from shoal.coordinator.cost.throughput import ThroughputObjective
from shoal.coordinator.cost.workload import Workload
from shoal.deploy import cli
from shoal.deploy.planning.layouts import LayoutName, LayoutRequest, layout
from shoal.deploy.simulate.modelled import Churn, ModelledRun, RunLimits, run_modelled
from shoal.deploy.simulate.scenario import STEPS_MAX, shipped_names
from shoal.protocol.errors import ShoalError
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.trace import Kind, Trace
from shoal.protocol.spec import AUTO_STAGES

HERE = Path(__file__).resolve().parent
CAMPAIGN = CampaignOptions(peers=6, steps=20, fault_s=30.0)
"""Smaller swarms than those of the soak, so that fifty of them take four minutes."""
COORDINATION_S = 16.0
"""Faults last two terms, not three as in the soak, so that a thousand swarms take four minutes."""
LIVE = (SIX_EQUAL, "two-universities", "mixed-cards", "home-gpus", "spot-fleet", "growth")
"""The scenarios that play `LIVE_S` in about ten seconds."""
LIVE_S, COARSE = 30.0, 8
"""The virtual time of a live swarm, and how many of its microbatches become one."""
GROWTH, GROWTH_S = (1, 2, 6, 3), 60.0
"""The sizes of the swarm that grows, and the virtual time of each."""
PLAN_WORK, DTFM_WORK = WORK_PER_SECOND, WORK_PER_SECOND // 5
"""The work of one search, on our objective and on DT-FM's: about a second of one core, and a fifth."""
STATUS_STEPS = 12
PLANS = {
    "home-gpus": ["home-gpus"],
    "mixture by dtfm": ["mixture", "--objective", "dtfm", "--stages", "4"],
    "network compared": [str(HERE / "network.json"), "--compare", "--stages", "2"],
}


class Tape:
    """Takes down one case."""

    def __init__(self, *, is_full: bool) -> None:
        self._is_full, self._full = is_full, list[str]()
        self._hash, self._count = hashlib.blake2b(digest_size=16), 0
        self._kinds: dict[type, int] = {}

    def tell(self, *values: Any, name: str = "") -> None:
        """Take down values. `name` is for people."""
        data = msgspec.msgpack.encode(plain(values))
        if self._is_full:
            self._full.append(f"{msgspec.msgpack.decode(data)!r}\t{name}")
        self._hash.update(data)
        self._count += 1

    def kind(self, value: object) -> int:
        """Return the number that stands for the type of `value` in this case."""
        return self._kinds.setdefault(type(value), len(self._kinds))

    @property
    def items(self) -> list[str]:
        return self._full if self._is_full else [f"{self._count} items, hash {self._hash.hexdigest()}"]


def plain(value: Any) -> Any:
    """Strip names from a value. A struct with a tag is left to its encoder, which writes it as it is on the wire."""
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return [[plain(key), plain(each)] for key, each in value.items()]
    if isinstance(value, set | frozenset):
        return sorted((plain(each) for each in value), key=repr)
    if isinstance(value, msgspec.Struct) and value.__struct_config__.tag is None:
        names, defaults = value.__struct_fields__, value.__struct_defaults__
        fields = list(zip(names, (msgspec.NODEFAULT,) * (len(names) - len(defaults)) + defaults, strict=True))
    elif dataclasses.is_dataclass(value):
        fields = [(field.name, field.default) for field in dataclasses.fields(value)]
    else:
        return value.tolist() if hasattr(value, "tolist") else value
    values = [(getattr(value, name), default) for name, default in fields]
    return [plain(each) for each, default in values if type(each) is not type(default) or each != default]


# --- the sections: each function plays one case ---


def campaign(seed: str, tape: Tape) -> None:
    """Play one swarm that trains and suffers: tell its trace, and every loss that a group agreed on."""
    witness = run_trial(draw_trial(int(seed), CAMPAIGN))
    verdict = witness.verdict
    tape.tell(verdict.trace_hash, verdict.virtual_s, verdict.broken is None, name="trace")
    for committed in witness.commits.values():
        tape.tell(committed.at_s, committed.name, committed.report, name="commit")


def coordination(seed: str, tape: Tape) -> None:
    """Play one swarm that only coordinates: tell every event of every core, and the commands that it answers with."""
    handle = CoordinationCore.handle

    def recorded(core: CoordinationCore, event: Any, *, now_s: float) -> Any:
        tape.tell(now_s, core.me, tape.kind(event), event, name=type(event).__name__)
        commands = handle(core, event, now_s=now_s)
        for command in (each for each in commands if not isinstance(each, LogReason)):
            what = None if isinstance(command, Alarm) else command
            tape.tell(now_s, core.me, tape.kind(command), what, name=type(command).__name__)
        return commands

    with mock.patch.object(CoordinationCore, "handle", recorded):
        verdict = soak.Game(int(seed), duration_s=COORDINATION_S).play()
    tape.tell(verdict.trace_hash, verdict.num_plans, verdict.num_terms, verdict.calm_after_s, len(verdict.flaws))


def planner(name: str, tape: Tape) -> None:
    """Lay out one scenario or network by rule, and search with a few seeds: `shoal plan` shows the better of both."""
    request = _request(name)
    for what, found in _layouts(request, ("at-once", "greedy")):
        tape.tell(what, found and found.stages, found and found.bounds)
    for seed in range(3):
        searched, cost = plan(request.topology, request.workload, num_stages=request.stages, seed=seed, work=PLAN_WORK)
        tape.tell("searched", seed, searched.stages, searched.bounds, cost.seconds)


def figures(name: str, tape: Tape) -> None:
    """Tell what layouts by rule cost, part by part: rounding may move these where no placement moves."""
    request = _request(name)
    for what, found in _layouts(request, ("at-once", "greedy", "mod")):
        cost = found and ThroughputObjective(request.topology, request.workload).cost(found)
        for part, value in ({"s": cost.seconds} | cost.parts).items() if cost else ():
            tape.tell(what, part, value)


def _request(name: str) -> LayoutRequest:
    scenario = case(name)
    return LayoutRequest(topology=scenario.topology, workload=Workload.of(scenario.spec), stages=scenario.stages)


def _layouts(request: LayoutRequest, wanted: tuple[LayoutName, ...]) -> Iterator[tuple[LayoutName, Placement | None]]:
    for what in wanted:
        try:
            yield what, layout(what, request)
        except ShoalError:
            yield what, None


def dtfm(name: str, tape: Tape) -> None:
    """Search on the DT-FM paper's objective in one of its networks."""
    network, _, seed = name.partition(", seed ")
    topology = paper_network(int(network))
    found, cost = plan_dtfm(topology, PAPER_WORKLOAD, num_stages=PAPER_STAGES, seed=int(seed), work=DTFM_WORK)
    tape.tell(cost.seconds, found.stages)


def live(name: str, tape: Tape) -> None:
    """Play a swarm that decides by itself, on modelled devices."""
    what, _, seed = name.partition(", seed ")
    churn: tuple[Churn, ...] = ()
    if what == "growth":
        scenario, devices = swarm(int(seed))
        spec, churn = scenario.spec, churn_of(devices, GROWTH, GROWTH_S)
    else:
        scenario = with_steps(coarser(case(what), COARSE), STEPS_MAX)
        live_swarm = msgspec.structs.replace(scenario.spec.swarm, stages=scenario.stages or AUTO_STAGES)
        spec = msgspec.structs.replace(scenario.spec, swarm=live_swarm)
    limits = RunLimits(steps=STEPS_MAX, seconds=GROWTH_S * len(GROWTH) if churn else LIVE_S)
    play = ModelledRun(topology=scenario.topology, spec=spec, seed=int(seed), churn=churn, limits=limits)
    result = run_modelled(play)
    tape.tell(result.trace_hash, result.ending.num_events, result.duplicates, result.given_up, name="trace")
    for step in (*result.steps, *result.ending.undone):
        tape.tell(*step, name="step")
    for event in result.events:
        tape.tell(event.at_s, event.change, event.device, name=event.text)


def golden(name: str, tape: Tape) -> None:
    """Tell what a script reads: `plan --json`, `status --json`, and the data of the report's page and its CSV."""
    what, _, how = name.partition(" ")
    if what == "plan":
        _tell_leaves(json.loads(_shoal("plan", *PLANS[how], "--seconds", "0.1", "--json")), tape)
    elif what == "status":
        _tell_leaves(json.loads(run(_status(experts=4 if how else 0))), tape)
    else:
        with tempfile.TemporaryDirectory() as folder:
            page, csv = Path(folder, "page.html"), Path(folder, "steps.csv")
            _shoal("report", str(HERE / "record.jsonl"), "--output", str(page), "--csv", str(csv))
            found = re.search(r'<script[^>]* id="data">(.*?)</script>', page.read_text(), re.S)
            _tell_leaves([json.loads(found[1]) if found else None, csv.read_text().splitlines()], tape)


def _shoal(*words: str) -> str:
    return CliRunner().invoke(cli.app, list(words), catch_exceptions=False).stdout


async def _status(*, experts: int) -> bytes:
    """Train a small swarm some steps. Returns: its status as `shoal status --json` prints it."""
    spec = tiny_spec(steps=2 * STATUS_STEPS, peers=6, term_s=5.0, experts=experts)
    swarm = SimSwarm(spec, tiny_corpus(), seed=0, network=uniform(0.02, 1e7))
    for number in range(6):
        await swarm.add(f"n{number}")
    await swarm.until(lambda: len(swarm.steps) >= STATUS_STEPS)
    return msgspec.json.encode(await swarm.world.peers["n1"].spawn(swarm.nodes["n1"].status()))


def _tell_leaves(value: Any, tape: Tape, path: str = "") -> None:
    """Tell each leaf with its path, without the seconds that a search took."""
    if isinstance(value, dict | list) and value:
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            if key != "took_s":
                _tell_leaves(each, tape, f"{path}/{key}")
    else:
        tape.tell(path, value)


NETWORKS = (*shipped_names(), SIX_EQUAL, *(f"uneven-{number}" for number in range(4)))
LONG = (campaign, coordination, live)
SECTIONS: dict[Callable[[str, Tape], None], list[str]] = {
    planner: [*NETWORKS],
    figures: [*NETWORKS],
    dtfm: [f"{network}, seed {seed}" for network in range(1, 6) for seed in range(10)],
    golden: [*(f"plan {name}" for name in PLANS), "report", "status", "status with experts"],
    live: [f"{name}, seed {seed}" for name in LIVE for seed in range(3)],
    coordination: [str(seed) for seed in range(1000)],
    campaign: [str(seed) for seed in range(50)],
}
BY_NAME = {section.__name__: section for section in SECTIONS}


def play(what: tuple[str, str], *, is_full: bool) -> bytes:
    """Play one case. Returns: its line. An exception is an item, too."""
    logging.disable(logging.CRITICAL)
    name, of = what
    section = BY_NAME[name]
    tape = Tape(is_full=is_full or section not in LONG)
    begun_s, add = time.process_time(), Trace.add

    def watched(trace: Trace, at_s: float, kind: Kind, *rest: int) -> None:
        tape.tell(at_s, int(kind), *rest, name=kind.name)
        add(trace, at_s, kind, *rest)

    with mock.patch.object(Trace, "add", watched if is_full and section in LONG else add):
        try:
            section(of, tape)
        except Exception as error:
            tape.tell("it broke", name=repr(error))
    return msgspec.json.encode([name, of, tape.items, time.process_time() - begun_s]) + b"\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", metavar="SECTION[/CASE]", default=list(BY_NAME))
    parser.add_argument("--cases", type=int, help="the first so many of each section")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--full", action="store_true")
    asked = parser.parse_args()
    here = Path(shoal.protocol.__file__ or "").resolve()
    assert here.is_relative_to(HERE.parents[1]), f"shoal is {here}: set PYTHONPATH to the .typing of this tree"
    whats: list[tuple[str, str]] = []
    for name, _, of in (each.partition("/") for each in asked.only):
        whats += [(name, each) for each in ([of] if of else SECTIONS[BY_NAME[name]][: asked.cases])]
    # Fresh processes, as in the soak: torch's threads do not survive a fork. A new one now and then frees memory.
    with (
        multiprocessing.get_context("spawn").Pool(asked.jobs, maxtasksperchild=200) as pool,
        asked.out.open("wb") as file,
    ):
        for line in pool.imap(partial(play, is_full=asked.full), whats):
            file.write(line)


if __name__ == "__main__":
    main()
