"""One replica's `Schedule` between replicas of other stages, fed with events by hand."""

from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.replica.commands import ScheduleCommand
from shoal.peer.replica.events import ScheduleEvent
from shoal.peer.replica.flow import Window
from shoal.peer.replica.job import Job
from shoal.peer.replica.router import Router
from shoal.peer.replica.schedule import Schedule
from shoal.protocol.identity import PeerID

UP, DOWN, OTHER = (PeerID(name) for name in ("up", "down", "other"))


def core(
    *,
    stage: int = 1,
    num_stages: int = 3,
    s_max: int = 1,
    synchronous_steps: int = 0,
    targets: tuple[PeerID, ...] = (DOWN,),
) -> Schedule:
    """All targets are ready."""
    router = Router()
    router.set_shares(dict.fromkeys(targets, 1.0))
    for target in targets:
        router.set_ready(target, True)
    window = Window(num_stages=num_stages) if stage == 0 else None
    return Schedule(
        stage=stage,
        num_stages=num_stages,
        s_max=s_max,
        synchronous_steps=synchronous_steps,
        version=0,
        router=router,
        window=window,
        upstream=frozenset((UP, OTHER)),
    )


def feed(made: Schedule, *events: ScheduleEvent) -> list[ScheduleCommand]:
    """The commands of the last event."""
    commands: list[ScheduleCommand] = []
    for event in events:
        commands = made.handle(event, now_s=0.0)
    return commands


def job(kind: str, step: int, index: int, version: int = 0) -> Job:
    return Job(kind, Microbatch(step, index), version)  # type: ignore[arg-type]


A, B, C = Microbatch(0, 0), Microbatch(0, 1), Microbatch(0, 2)
