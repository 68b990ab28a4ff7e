"""Watch one simulated run: every invariant sees every event, and a verdict follows at the end."""

import math
from collections import Counter, deque
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from invariants import Expectation, all_invariants
from sightings import CommitSeen, Event, Held, Injected, Opened, Quiet, Ticked
from sim_faults import FaultKind, Schedule
from single_process import train
from tiny_run import tiny_corpus
from trial import Trial

from shoal.protocol.spec import RunSpec, WireSpec


class RunVerdict(msgspec.Struct, kw_only=True):
    """The result of a run: a line of `--json`. `broken` is the violated sentence; None: all held."""

    seed: int
    broken: str | None = None
    detail: str = ""
    schedule: Schedule = ()
    last_events: tuple[str, ...] = ()
    trace_hash: str = ""
    injected: dict[str, int] = msgspec.field(default_factory=dict)
    """Kind -> number of faults that began."""
    recoveries_s: list[float] = msgspec.field(default_factory=list)
    """Seconds from each kill to the next step of the last stage."""
    again_s: float = math.inf
    """Seconds from the end of the last fault to the next step of the last stage."""
    steps: int = 0
    microbatches: int = 0
    """The committed microbatches, summed over stages."""
    duplicates: int = 0
    given_up: int = 0
    virtual_s: float = 0.0
    training_s: float = 0.0
    """Seconds from the first to the last step of the last stage."""
    wall_s: float = 0.0


class RunWitness:
    """Records the events of one run that a verdict needs."""

    def __init__(self, trial: Trial) -> None:
        self.verdict = RunVerdict(seed=trial.seed, schedule=trial.schedule)
        self.commits: dict[tuple[int, int, int], CommitSeen] = {}
        """(era, stage, step) -> its first report."""
        self.rounds: list[Opened] = []
        self.steps_s: list[float] = []
        """The time of each first step of the last stage; steps of another era count again."""
        self.quiet_s = math.inf
        spec = trial.spec
        stages = spec.swarm.stages_max
        assert stages is not None, "a campaign says how many stages its swarms have"
        expected = Expectation(
            steps=spec.training.steps,
            microbatches=spec.training.microbatches_per_step,
            stages=stages,
            losses=single_process_losses(spec) if spec.training.s_max == 0 and _is_exact(spec.wire) else None,
        )
        self._last_stage = stages - 1
        self._invariants = all_invariants(expected)
        self._last_events: deque[str] = deque(maxlen=40)
        self._held: set[tuple[int, int]] = set()
        self._kills_s: list[float] = []
        self._injected: Counter[str] = Counter()

    def see(self, event: Event) -> None:
        """Take an event. Nodes call this and get no answer."""
        if self.verdict.broken is not None:
            return
        match event:
            case CommitSeen(report=report):
                self.commits.setdefault((report.era, report.stage, report.step), event)
            case Held() if event.stage == self._last_stage and (event.era, event.version) not in self._held:
                if (event.era, event.version - 1) in self._held:  # else it was fetched, or made from the seed
                    self.steps_s.append(event.at_s)
                self._held.add((event.era, event.version))
            case Opened():
                self.rounds.append(event)
            case Injected(fault=fault):
                self._injected[str(fault.kind)] += 1
                if fault.kind in (FaultKind.CRASH, FaultKind.POWER_CUT):
                    self._kills_s.append(event.at_s)
            case Quiet():
                self.quiet_s = event.at_s
            case _:
                pass
        if not isinstance(event, Ticked):
            self._last_events.append(f"{event.at_s:9.3f} s  {event}")
        for invariant in self._invariants:
            flaw = invariant.see(event)
            if flaw is not None:
                self.condemn(invariant.sentence, f"at {event.at_s:.3f} s: {flaw}")
                return

    def condemn(self, sentence: str, detail: str) -> None:
        """Record a violated invariant. Only the first one counts."""
        if self.verdict.broken is None:
            self.verdict.broken, self.verdict.detail = sentence, detail
            self.verdict.last_events = tuple(self._last_events)

    def conclude(self, *, trace_hash: str, now_s: float) -> None:
        verdict, times_s = self.verdict, self.steps_s
        verdict.trace_hash, verdict.virtual_s = trace_hash, now_s
        verdict.injected = dict(sorted(self._injected.items()))
        reports = [event.report for event in self.commits.values()]
        verdict.microbatches = sum(report.microbatches for report in reports)
        verdict.duplicates = sum(report.duplicates for report in reports)
        verdict.given_up = sum(report.given_up for report in reports)
        verdict.steps = len({report.step for report in reports if report.stage == self._last_stage})
        verdict.training_s = times_s[-1] - times_s[0] if times_s else 0.0
        verdict.recoveries_s = _until_next(self._kills_s, times_s)
        verdict.again_s = next(iter(_until_next([self.quiet_s], times_s)), math.inf)


def _is_exact(wire: WireSpec) -> bool:
    return wire == WireSpec(activations="fp32")


@lru_cache(maxsize=8)
def single_process_losses(spec: RunSpec) -> tuple[float, ...]:
    """Return the losses of the same training in one process, step by step."""
    return tuple(step.loss for step in train(spec, tiny_corpus(), steps=spec.training.steps))


def _until_next(moments_s: Sequence[float], steps_s: Sequence[float]) -> list[float]:
    after = ((moment_s, next((s for s in steps_s if s > moment_s), None)) for moment_s in moments_s)
    return [step_s - moment_s for moment_s, step_s in after if step_s is not None]
