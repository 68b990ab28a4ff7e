"""What the study runs: tables of rows (`rows.py`).

`full()` is what the README's figures are of, many hours of two cores; `short()` has every kind of row in it and takes
five minutes: enough to see that it works, too little to learn from.
"""

import functools
from collections.abc import Sequence

import msgspec
from rows import Role, Row, Table
from settings import (
    HeavyTailed,
    HeavyTailedBegun,
    Method,
    Paper,
    PaperBegun,
    Regime,
    Run,
    Steps,
    StepsBegun,
    Swarm,
    SwarmBegun,
)
from tasks import BatchShape

from shoal.protocol.spec import OptimizerSpec

DEFAULT = Method(name="eager")
"""The compensation that the run spec takes by default."""
OTHERS = ("spectrain", "pipeoptim", "lookahead", "calibrated", "dc")
"""Compensations that are compared with none and ours; "stash" is "none" in regime C, where weights are kept until the
backward."""

# --- what rows are made of ---

ADAMW = OptimizerSpec(name="adamw", warmup_steps=20)
NADAM = OptimizerSpec(name="nadam", warmup_steps=20)
MUON = OptimizerSpec(name="muon", warmup_steps=20)
SGD = OptimizerSpec(name="sgd", warmup_steps=20, weight_decay=0.001)
SMOOTH_NADAM = OptimizerSpec(name="nadam", beta1=0.99, warmup_steps=20)
"""With stashing this is arXiv 2505.01099."""

STEP_4096 = BatchShape(microbatches_per_step=16, microbatch_size=1)
"""Of 256 tokens a sample."""
UPDATE_1024 = BatchShape(microbatches_per_step=1, microbatch_size=4)
STEP_64 = BatchShape(microbatches_per_step=16, microbatch_size=4)
UPDATE_16 = BatchShape(microbatches_per_step=1, microbatch_size=16)
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
ALL_STALE = Steps(shares=(1.0,))
QUARTER_STALE = Steps(shares=(0.25,))
SEEN = {
    "of two replicas, while they reduce": Steps(shares=(1.0,), replicas=2, waiting=1.0),
    "of four replicas, while they reduce": Steps(shares=(1.0,), replicas=4, waiting=1.0),
    "nothing seen": ALL_STALE,
}
"""What a member has of a step when it computes the next one, all of that stale. Says nothing to who does not see."""
STEPS = 400
"""Where a table says nothing else."""
FEWER = (100, 150, 200, 300)
"""Steps of runs that are cut short."""
NOT_STASHED = Method(name="pipeoptim", stash=False)


def _row(
    label: str,
    regime: Regime,
    method: Method | str = "none",
    *,
    table: str,
    task: str = "bytes",
    optimizer: OptimizerSpec = ADAMW,
    shape: BatchShape = STEP_4096,
    updates: int = STEPS,
    points: int = 20,
    rates: tuple[float, ...] = RATES,
    seeds: int = 1,
    role: Role = "",
) -> Row:
    run = Run(
        task=task,
        shape=shape,
        regime=regime,
        method=Method(name=method) if isinstance(method, str) else method,
        optimizer=optimizer,
        updates=updates,
        validate_every=max(1, updates // points),
        group=table,
    )
    return Row(label=label, run=run, rates=rates, seeds=seeds, role=role)


def _usual_rate(optimizer: OptimizerSpec) -> float:
    """At which rows of one rate are made."""
    return 8e-3 if optimizer == MUON else 4e-3


# --- regime C ---


def _check() -> Table:
    """What an earlier harness measured with one seed: 1.855, 2.258, 2.074. All are runs of the next table too."""
    row = functools.partial(_row, table="check", rates=(2e-3,))
    rows = (
        row("synchronous (1.855)", Steps(), role="synchronous"),
        row("none (2.258)", ALL_STALE, role="none"),
        row("PipeOptim (2.074)", ALL_STALE, "pipeoptim"),
    )
    return Table(name="check", title="Known values, AdamW, all stale by one, 400 steps", rows=rows)


def _all_stale() -> list[Table]:
    rates = {"adamw": RATES, "nadam": RATES, "muon": (4e-3, 8e-3, 1.6e-2), "sgd": (0.05, 0.1, 0.2, 0.4)}
    tables = []
    for optimizer in (ADAMW, MUON, NADAM, SGD):
        first = optimizer in (ADAMW, MUON)
        name, seeds = f"c-{optimizer.name}", 3 if first else 1
        row = functools.partial(_row, table=name, optimizer=optimizer, rates=rates[optimizer.name])
        rows = [
            row("synchronous", Steps(), seeds=seeds, role="synchronous"),
            row("none", ALL_STALE, seeds=seeds, role="none"),
        ]
        for label, regime in SEEN.items():
            rows.append(row(f"{DEFAULT.name}, {label}", regime, DEFAULT, seeds=seeds))
        for method in OTHERS if first else ("pipeoptim", "lookahead", "calibrated"):
            rows.append(row(method, ALL_STALE, method, seeds=seeds if method == "pipeoptim" else 1))
        title = f"Regime C, {optimizer.name}, every microbatch one step stale, 400 steps"
        tables.append(Table(name=name, title=title, rows=tuple(rows)))
    return tables


def _fewer_steps() -> list[Table]:
    """What a synchronous run reaches in fewer steps, at a rate that staleness is measured at: what a loss is worth in
    steps, and so the prices of `shoal.protocol.staleness`."""
    tables = []
    for optimizer, rate in ((ADAMW, 4e-3), (NADAM, 4e-3), (MUON, 8e-3)):
        name = f"c-fewer-{optimizer.name}"
        row = functools.partial(_row, table=name, optimizer=optimizer, rates=(rate,))
        rows = [row("synchronous", Steps(), role="synchronous"), row("all stale: none", ALL_STALE, role="none")]
        rows += [row(f"synchronous, {steps} steps", Steps(), updates=steps) for steps in FEWER]
        tables.append(Table(name=name, title=f"Regime C, {optimizer.name}, runs of fewer steps", rows=tuple(rows)))
    return tables


def _begun() -> list[Table]:
    """All stale by one, or ten of sixteen, but for the first steps. What the default optimizer shows decides."""
    tables = []
    for optimizer, rates in ((NADAM, (2e-3, 4e-3, 8e-3)), (ADAMW, (4e-3,)), (MUON, (8e-3,))):
        name, seeds = f"c-begun-{optimizer.name}", 3 if optimizer == NADAM else 1
        row = functools.partial(_row, table=name, optimizer=optimizer, rates=rates, seeds=seeds)
        once = functools.partial(_row, table=name, optimizer=optimizer, rates=(_usual_rate(optimizer),))
        rows = [
            row("synchronous", Steps(), role="synchronous"),
            row("none", ALL_STALE, role="none"),
            row(f"40 steps synchronous, then {DEFAULT.name}, of two replicas", _begun_by_two(1.0, 1.0), DEFAULT),
            row(f"... and 10 of 16 stale: {DEFAULT.name}", _begun_by_two(0.625, 0.5), DEFAULT),
        ]
        for method in ("none", "pipeoptim"):
            rows.append(once(f"40 steps synchronous, then {method}", StepsBegun(shares=(1.0,)), method))
        for steps in (20, 80):
            regime = _begun_by_two(1.0, 1.0, steps)
            rows.append(once(f"{steps} steps synchronous, then {DEFAULT.name}, of two replicas", regime, DEFAULT))
        tables.append(Table(name=name, title=f"Regime C, {optimizer.name}, begun synchronously", rows=tuple(rows)))
    return tables


def _begun_by_two(share: float, waiting: float, synchronous_steps: int = 40) -> StepsBegun:
    return StepsBegun(shares=(share,), replicas=2, waiting=waiting, synchronous_steps=synchronous_steps)


def _shares() -> Table:
    regimes = {
        "a quarter stale": QUARTER_STALE,
        "half stale": Steps(shares=(0.5,)),
        "s_max 2, halves": Steps(shares=(0.5, 0.5)),
        "a quarter stale, a kill in 20 steps": Steps(shares=(0.25,), steps_a_kill=20),
    }
    row = functools.partial(_row, table="c-shares", rates=(2e-3, 4e-3))
    rows = [row("synchronous", Steps(), role="synchronous"), row("all stale: none", ALL_STALE, role="none")]
    for label, regime in regimes.items():
        for method in ("none", "pipeoptim", DEFAULT.name):
            rows.append(row(f"{label}: {method}", regime, method))
    return Table(name="c-shares", title="Regime C, AdamW, shares of stale microbatches, 400 steps", rows=tuple(rows))


def _long() -> Table:
    row = functools.partial(_row, table="c-long", optimizer=NADAM, updates=4000, rates=(4e-3,), points=40)
    rows = (
        row("synchronous", Steps(), seeds=3, role="synchronous"),
        row("none", ALL_STALE, role="none"),
        row("pipeoptim", ALL_STALE, "pipeoptim"),
        row(f"40 steps synchronous, then {DEFAULT.name}, of two replicas", _begun_by_two(1.0, 1.0), DEFAULT, seeds=3),
        row(f"... and 10 of 16 stale: {DEFAULT.name}", _begun_by_two(0.625, 0.5), DEFAULT, seeds=3),
    )
    return Table(name="c-long", title="Regime C, NAdam, 4,000 steps", rows=rows)


# --- regimes A and B ---


def _one_a_step(name: str, title: str, regime: Regime, synchronous: Regime, begun: Regime) -> list[Table]:
    row = functools.partial(_row, table=name, shape=UPDATE_1024, updates=2000, rates=(5e-4, 1e-3, 2e-3))
    rows = (
        row("synchronous", synchronous, seeds=3, role="synchronous"),
        row("none", regime, seeds=3, role="none"),
        row("PipeDream (stash)", regime, "stash"),
        row("SpecTrain", regime, "spectrain"),
        row("PipeOptim (not stashed)", regime, NOT_STASHED, seeds=3),
        row("PipeOptim, stashed", regime, "pipeoptim"),
        row("look-ahead", regime, "lookahead"),
        row("calibrated", regime, "calibrated", seeds=3),
        row("NAdam, beta1 .99, stash", regime, "stash", optimizer=SMOOTH_NADAM, seeds=3),
        row("NAdam, beta1 .99, calibrated", regime, "calibrated", optimizer=SMOOTH_NADAM),
        row("100 updates synchronous, then calibrated", begun, "calibrated", seeds=3),
        row("... then NAdam, beta1 .99, stash", begun, "stash", optimizer=SMOOTH_NADAM, seeds=3),
        row(f"... then NAdam, {DEFAULT.name}", begun, DEFAULT, optimizer=NADAM),
    )
    muon = f"{name}-muon"
    row = functools.partial(row, table=muon, optimizer=MUON, rates=(4e-3, 8e-3), seeds=3)
    with_muon = (
        row("synchronous", synchronous, role="synchronous"),
        row("none", regime, role="none"),
        row("PipeDream (stash)", regime, "stash"),
        row("PipeOptim, stashed", regime, "pipeoptim"),
        row("calibrated", regime, "calibrated", seeds=1),
        row("100 updates synchronous, then PipeOptim, stashed", begun, "pipeoptim", seeds=1),
    )
    return [Table(name=name, title=title, rows=rows), Table(name=muon, title=f"{title}, Muon", rows=with_muon)]


def _paper() -> list[Table]:
    return _one_a_step(
        "a", "Regime A, 8 stages, one microbatch an update", Paper(), Paper(synchronous=True), PaperBegun()
    )


def _heavy_tailed() -> list[Table]:
    title = "Regime B, 8 stages, 16 in flight, Pareto hops"
    table, *others = _one_a_step("b", title, HeavyTailed(), HeavyTailed(in_flight=1), HeavyTailedBegun())
    told = next(row for row in table.rows if row.run.method == Method(name="pipeoptim"))
    run = msgspec.structs.replace(told.run, regime=HeavyTailed(known="true"))
    true = Row(label=f"{told.label}, knowing its staleness", run=run, rates=told.rates)
    return [Table(name=table.name, title=table.title, rows=(*table.rows, true)), *others]


# --- the other tasks ---


def _classifiers() -> list[Table]:
    tables = []
    for task, optimizer, rates in (
        ("digits", SGD, (0.02, 0.05, 0.1)),
        ("digits", ADAMW, (1e-3, 3e-3)),
        ("sentences", ADAMW, (3e-4, 1e-3)),
    ):
        at = functools.partial(_row, task=task, optimizer=optimizer, rates=rates, seeds=3)
        tail = f"{task}-{optimizer.name}"
        row = functools.partial(at, table=f"a-{tail}", shape=UPDATE_16, updates=2000)
        rows = [row("synchronous", Paper(synchronous=True), role="synchronous"), row("none", Paper(), role="none")]
        rows += [row("PipeDream (stash)", Paper(), "stash"), row("PipeOptim (not stashed)", Paper(), NOT_STASHED)]
        rows += [row(method, Paper(), method) for method in ("pipeoptim", "spectrain", "calibrated")]
        tables.append(Table(name=f"a-{tail}", title=f"Regime A, {task}, {optimizer.name}", rows=tuple(rows)))
        row = functools.partial(at, table=f"c-{tail}", shape=STEP_64, updates=400)
        rows = [row("synchronous", Steps(), role="synchronous"), row("none", ALL_STALE, role="none")]
        rows += [row(method, ALL_STALE, method) for method in ("pipeoptim", "calibrated")]
        rows += [row(f"{DEFAULT.name}, {label}", regime, DEFAULT) for label, regime in SEEN.items()]
        tables.append(Table(name=f"c-{tail}", title=f"Regime C, {task}, {optimizer.name}", rows=tuple(rows)))
    return tables


# --- the swarm itself ---


NETWORKS = ("data-centre", "two-universities", "mixed-cards", "home-gpus", "spot-fleet")
"""The shipped ones beside the eight cities."""


def _swarm(
    optimizer: OptimizerSpec,
    *,
    replicas: int = 1,
    scenario: str = "eight-cities",
    updates: int = STEPS,
) -> Table:
    """Of a longer run only what decides."""
    name = f"swarm-{scenario}-{replicas}-{optimizer.name}-{updates}"
    row = functools.partial(_row, table=name, optimizer=optimizer, updates=updates, rates=(_usual_rate(optimizer),))
    at = functools.partial(Swarm, scenario=scenario, replicas=replicas)
    rows = [
        row("synchronous", at(s_max=0), "stash", role="synchronous"),
        row("s_max 1: none", at(s_max=1), "stash", role="none"),
    ]
    if optimizer != MUON:  # for which a run does not begin so
        begun = SwarmBegun(scenario=scenario, replicas=replicas, s_max=1)
        rows.append(row(f"s_max 1, begun synchronously: {DEFAULT.name}", begun, DEFAULT))
    if updates == STEPS:
        rows += [row(f"s_max {s_max}: {DEFAULT.name}", at(s_max=s_max), DEFAULT) for s_max in (1, 2)]
        if replicas > 1:
            rows.append(row("s_max 0, a kill in two minutes", at(s_max=0, kill_every_s=120.0), "stash"))
            rows.append(row(f"s_max 1, as often: {DEFAULT.name}", at(s_max=1, kill_every_s=120.0), DEFAULT))
    title = f"The swarm's drivers, {scenario}, 8 stages of {replicas}, {optimizer.name}, {updates} steps"
    return Table(name=name, title=title, rows=tuple(rows))


def full() -> list[Table]:
    """In the order of what one wants to know first."""
    first = [_check(), *_all_stale(), *_fewer_steps(), *_begun(), *_paper(), *_heavy_tailed(), _shares()]
    swarms = [_swarm(optimizer, replicas=replicas) for optimizer in (NADAM, MUON) for replicas in (1, 2)]
    swarms += [_swarm(ADAMW), *(_swarm(NADAM, scenario=name) for name in NETWORKS)]
    swarms += [_swarm(NADAM, replicas=replicas, updates=1000) for replicas in (1, 2)] + [_swarm(NADAM, updates=4000)]
    return [*first, *swarms, *_classifiers(), _long()]


def short() -> list[Table]:
    """A twentieth of each kind of row, at one rate."""
    tables = [*_all_stale()[:3], _paper()[0], _heavy_tailed()[0], *_classifiers()[::2], _swarm(MUON)]
    return [_shortened(table) for table in tables]


def _shortened(table: Table) -> Table:
    few = [row for row in table.rows if row.role or row.run.method == DEFAULT]
    rows: Sequence[Row] = [_short_row(row) for row in few]
    return Table(name=f"short-{table.name}", title=f"{table.title}, cut short", rows=tuple(rows))


def _short_row(row: Row) -> Row:
    updates = {"swarm": 8, "a": 100, "b": 100}.get(row.run.group.split("-")[0], 40)
    run = msgspec.structs.replace(
        row.run,
        updates=updates,
        validate_every=max(1, updates // 4),
        group=f"short-{row.run.group}",
        optimizer=msgspec.structs.replace(row.run.optimizer, warmup_steps=5),
    )
    return Row(label=row.label, run=run, rates=row.rates[1:2] or row.rates, role=row.role)
