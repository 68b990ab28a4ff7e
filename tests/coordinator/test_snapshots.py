from collections.abc import Callable

from shoal.coordinator.ledger import SnapshotSchedule
from shoal.protocol.messages import Heartbeat
from shoal.protocol.spec import RunSpec, SwarmSpec, TrainingSpec

INTERVAL_S, HEARTBEAT_S = 300.0, 1.0
OLD_S = 10 * INTERVAL_S
LATE = {"elapsed_s": OLD_S, "step_s": 1.0}


def schedule(interval_s: float = INTERVAL_S) -> SnapshotSchedule:
    swarm = SwarmSpec(snapshot_interval_s=interval_s, heartbeat_s=HEARTBEAT_S)
    return SnapshotSchedule(RunSpec(swarm=swarm, training=TrainingSpec(s_max=1)))


def test_nothing_is_due_before_the_interval_is_over(make_heartbeat: Callable[..., Heartbeat]) -> None:
    made = schedule()
    made.look(
        [make_heartbeat("a", stage=0, synced=True, version=7, unsaved_s=INTERVAL_S - 1)],
        0.0,
        elapsed_s=OLD_S,
        step_s=1.0,
    )
    assert made.save_at == 0


def test_a_version_is_named_that_all_hear_of_before_they_come_to_it(make_heartbeat: Callable[..., Heartbeat]) -> None:
    """Four steps a second: what is named is still to come when the last heartbeat has been answered."""
    made = schedule()
    for second in range(4):
        now_s, version = float(second), 100 + 4 * second
        made.look(
            [make_heartbeat("a", stage=0, synced=True, version=version, unsaved_s=INTERVAL_S + second)],
            now_s,
            elapsed_s=OLD_S,
            step_s=0.25,
        )
    assert made.save_at > 100 + 4 * 2 * HEARTBEAT_S


def test_one_version_is_named_until_everybody_has_come_to_it(make_heartbeat: Callable[..., Heartbeat]) -> None:
    made = schedule()

    def beats(first: int, second: int, unsaved_s: float) -> list[Heartbeat]:
        return [
            make_heartbeat("a", stage=0, synced=True, version=first, unsaved_s=unsaved_s),
            make_heartbeat("b", stage=1, synced=True, version=second, unsaved_s=unsaved_s),
        ]

    made.look(beats(10, 11, INTERVAL_S), 0.0, elapsed_s=OLD_S, step_s=0.0)
    named = made.save_at
    assert named == 11 + 2
    made.look(beats(12, 13, INTERVAL_S + 1), 1.0, **LATE)
    assert made.save_at == named
    made.look(beats(13, 14, 0.0), 2.0, **LATE)
    assert made.save_at == 0


def test_who_missed_it_leads_to_another(make_heartbeat: Callable[..., Heartbeat]) -> None:
    made = schedule()
    made.look([make_heartbeat("a", stage=0, synced=True, version=10, unsaved_s=INTERVAL_S)], 0.0, **LATE)
    named = made.save_at
    made.look(
        [make_heartbeat("a", stage=0, synced=True, version=named + 3, unsaved_s=INTERVAL_S + 9)],
        9.0,
        elapsed_s=OLD_S,
        step_s=1.0,
    )
    assert made.save_at > named + 3


def test_who_only_fetches_or_trains_nothing_does_not_count(make_heartbeat: Callable[..., Heartbeat]) -> None:
    made = schedule()
    made.look(
        [make_heartbeat("a", stage=0, synced=False, version=0, unsaved_s=2 * INTERVAL_S)],
        0.0,
        elapsed_s=OLD_S,
        step_s=1.0,
    )
    assert made.save_at == 0


def test_an_interval_of_zero_is_no_clock(make_heartbeat: Callable[..., Heartbeat]) -> None:
    made = schedule(interval_s=0.0)
    made.look([make_heartbeat("a", stage=0, synced=True, version=7, unsaved_s=1e9)], 1e9, elapsed_s=1e9, step_s=1.0)
    assert made.save_at == 0


def test_a_young_run_writes_each_time_it_is_twice_as_old(make_heartbeat: Callable[..., Heartbeat]) -> None:
    made, saved_s, written_s = schedule(), 0.0, list[float]()
    for second in range(1000):
        now_s = float(second)
        beat = make_heartbeat("a", stage=0, synced=True, version=second, unsaved_s=now_s - saved_s)
        made.look([beat], now_s, elapsed_s=now_s, step_s=1.0)
        if made.save_at and saved_s < now_s - 10.0:
            saved_s = now_s
            written_s.append(now_s)
    assert written_s == [30.0, 60.0, 120.0, 240.0, 480.0, 780.0]
