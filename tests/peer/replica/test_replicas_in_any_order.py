"""Stage groups of replicas with whatever may happen to them between any two events (`tests/lib`).

Always asserted: a round holds every microbatch at least once, its duplicates are exactly the surplus and nothing is
given up; no two rounds share a number; all reports of a step say the same; everybody alive ends at the last version
with one digest; nobody waits for ever.
"""

import random

import pytest

import group_replicas as replicas

MOST = {"changes": 4, "deaths": 3, "sleeps": 2, "losses": 8, "flips": 3}


def play(seed: int, *faults: str) -> "replicas.World":
    rng = random.Random(seed)
    size, steps, microbatches, s_max = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 6), rng.randint(0, 2)
    counts = {name: rng.randint(0, most) if name in faults else 0 for name, most in MOST.items()}
    world = replicas.World(rng=rng, size=size, steps=steps, M=microbatches, s_max=s_max, **counts)
    try:
        world.run()
        world.check_the_end()
    except AssertionError as error:
        tail = "\n".join(world.log[-30:])
        raise AssertionError(f"seed {seed} with {', '.join(faults) or 'no faults'}: {error}\n{tail}") from error
    return world


@pytest.mark.parametrize("seed", range(20))
def test_in_peace_every_microbatch_runs_once_and_every_step_is_reported_once(seed: int) -> None:
    world = play(seed)
    assert all(len(reports) == 1 for reports in world.reports.values())
    assert set(world.made.values()) <= {1}


@pytest.mark.parametrize("seed", range(20))
def test_lost_calls_replies_and_frames_cost_time_only(seed: int) -> None:
    play(seed, "losses")


@pytest.mark.parametrize("seed", range(30))
def test_members_die_return_or_quit_at_any_moment(seed: int) -> None:
    play(seed, "deaths")


@pytest.mark.parametrize("seed", range(20))
def test_who_sleeps_handles_what_was_queued_and_then_sees_that_it_was_counted_out(seed: int) -> None:
    play(seed, "sleeps")


@pytest.mark.parametrize("seed", range(20))
def test_members_begin_anew_while_the_others_go_on(seed: int) -> None:
    play(seed, "flips")


@pytest.mark.parametrize("seed", range(20))
def test_plans_bring_members_and_take_them_away(seed: int) -> None:
    play(seed, "changes")


@pytest.mark.parametrize(
    ("seed", "faults"),
    [
        # a newborn's Progress overtakes its PresenceUpdate, which then counted what it had said as the dead one's
        (360, ()),
        (443, ()),  # an older Progress arrives after a later one and names another lead
        (112, ("deaths",)),  # one quits that a round names, and has not heard of it
        (138, ("deaths",)),  # two rounds with one number
        (76, ("deaths",)),  # one that quits names a lead that has died
        (8, ("losses",)),  # a grant is lost before a step has shown how long it takes
        (48, ("flips",)),  # two tenures of one lead open two rounds
        (68, ("flips",)),  # one word says that a mate was lost and is ready again, and a round opened in between
        (153, ("changes",)),  # one that missed a plan is dropped without a word
    ],
)
def test_what_went_wrong_once(seed: int, faults: tuple[str, ...]) -> None:
    play(seed, *faults)


def test_one_seed_is_one_world() -> None:
    assert play(5, *MOST).log == play(5, *MOST).log
