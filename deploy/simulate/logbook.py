"""Records a modelled run: commits, plans, joins and losses, and the working time of devices."""

import asyncio
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from shoal.deploy.simulate.result import Change, Happened, JobSpan, StepCommitted
from shoal.protocol.messages import CommitReport
from shoal.protocol.plan import Plan
from shoal.protocol.sim.world import SimPeer


class SimLedger:
    """Records the events of one run.

    Args:
        steps: the number of steps that every group must commit before `reached` is set.
        keeps_timeline: True: keep each job of each device.
        on_step: called for each step that every group has committed.
    """

    def __init__(
        self,
        num_devices: int,
        *,
        steps: int,
        keeps_timeline: bool,
        on_step: Callable[[StepCommitted], None] = lambda step: None,
    ) -> None:
        self.steps: list[StepCommitted] = []
        self.undone: list[StepCommitted] = []
        """The committed steps that were undone, because the run went back to an earlier version."""
        self.events: list[Happened] = []
        self.failures: list[str] = []
        self.duplicates = 0
        self.given_up = 0
        self.reached = asyncio.Event()
        self.plan: Plan | None = None
        """The newest plan that any node obeyed."""
        self._num_groups = 0
        """How many groups must commit a step: stages and groups of expert holders of the latest reported plan."""
        self._wanted = steps
        self._on_step = on_step
        self._keeps_timeline = keeps_timeline
        self._timeline: list[list[JobSpan]] = [[] for _ in range(num_devices)]
        self._busy_s = np.zeros(num_devices)
        self._commits: dict[tuple[int, int], set[int]] = {}  # (era, step) -> groups
        self._plans: set[tuple[int, int]] = set()
        self._era = 0
        self._peers: dict[int, SimPeer] = {}
        self._read: dict[int, int] = {}

    # --- reports of nodes ---

    def joined(self, device: int, peer: SimPeer, name: str) -> None:
        self._read_jobs(device)
        self._peers[device], self._read[device] = peer, 0
        self._note("joined", device, name)

    def left(self, device: int, name: str) -> None:
        self._note("left", device, name)

    def obeyed(self, plan: Plan) -> None:
        """Record that a node obeys `plan`. All nodes report this; only the first report of each plan counts."""
        if plan.order in self._plans:
            return
        self._plans.add(plan.order)
        before = self.plan
        if before is None or plan.order > before.order:
            self.plan = plan
        self._num_groups = len(plan.stages) + len(plan.experts)
        if plan.era > self._era:
            self._era = plan.era
            if before is not None and before.cutover_version and before.cutover_version == plan.restore_version:
                stages = f"{len(before.stages)} stages became {len(plan.stages)}"
                self._note("division", -1, f"{stages} at step {plan.restore_version}")
            else:
                self._note("era", -1, f"back to version {plan.restore_version}")
            self.undone += [step for step in self.steps if step.step >= plan.restore_version]
            self.steps = [step for step in self.steps if step.step < plan.restore_version]
        self._note("plan", -1, plan.reason)

    def committed(self, report: CommitReport) -> None:
        """Record a commit. Every member of a group reports its commits; only the first report of each counts."""
        groups = self._commits.setdefault((report.era, report.step), set())
        if report.stage in groups:
            return
        groups.add(report.stage)
        self.duplicates += report.duplicates
        self.given_up += report.given_up
        if len(groups) == self._num_groups and report.era == self._era:
            self.steps.append(StepCommitted(report.step, self._now_s()))
            self._on_step(self.steps[-1])
            if report.step + 1 >= self._wanted:
                self.reached.set()

    # --- devices ---

    @property
    def present(self) -> tuple[int, ...]:
        """The devices that are up now."""
        return tuple(device for device, peer in sorted(self._peers.items()) if peer.is_alive)

    def read_jobs(self) -> None:
        """Add the jobs that devices have finished since the last call to this record, and clear the devices' lists."""
        for device in self._peers:
            self._read_jobs(device)

    def busy_s(self) -> tuple[float, ...]:
        return tuple(float(seconds) for seconds in self._busy_s)

    def timeline(self) -> tuple[tuple[JobSpan, ...], ...]:
        if not self._keeps_timeline:
            return ()
        return tuple(tuple(sorted(spans, key=lambda span: span.started_s)) for spans in self._timeline)

    def _read_jobs(self, device: int) -> None:
        peer = self._peers.get(device)
        if peer is None:
            return
        jobs = peer.compute.timeline
        done = [job for job in jobs if job.kind != "probe"]
        self._busy_s[device] += sum(job.ended_s - job.started_s for job in done)
        if self._keeps_timeline:
            self._timeline[device] += [JobSpan(job.kind, job.started_s, job.ended_s) for job in done]
        jobs.clear()

    def _note(self, change: Change, device: int, text: str) -> None:
        self.events.append(Happened(self._now_s(), change, device, text))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def traffic_matrix(sent: Mapping[tuple[int, int], int], num_devices: int) -> npt.NDArray[np.int64]:
    """Return the sent bytes as a matrix [N, N], row = sender. Args: sent: (sender, receiver) -> bytes."""
    matrix = np.zeros((num_devices, num_devices), dtype=np.int64)
    for (source, destination), nbytes in sent.items():
        matrix[source, destination] = nbytes
    return matrix
