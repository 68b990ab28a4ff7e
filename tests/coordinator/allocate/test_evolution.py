"""The loop itself, on an objective so simple that every choice it makes shows."""

from random import Random

import numpy as np

from shoal.coordinator.allocate.evolution import HOMELESS, Improved, evolve, perturbed


class Teams:
    """Stands for a `ThroughputEvaluator`: sum over stages of the squared sum of the members' weights, any sizes."""

    def __init__(self, weights, num_stages, *, reach=3):
        self.weights = np.array(weights, dtype=np.float64)
        self.num_devices, self.num_stages = len(weights), num_stages
        self.draws = 1
        self.share = 100
        self.reach = reach
        self.calls, self.found = [], []

    def cost(self, assignment):
        assert (assignment >= 0).all()
        sums = np.bincount(assignment, weights=self.weights, minlength=self.num_stages)
        return float((sums**2).sum())

    def random(self, seed):
        return np.array([Random(seed + d).randrange(self.num_stages) for d in range(self.num_devices)])

    def repair(self, assignment, *, seed):
        return np.where(assignment < 0, self.random(seed), assignment)

    def improve(self, assignment, *, seed, work, heat):
        """`reach` random moves, kept if they help: weak on purpose."""
        self.calls.append((work, heat))
        rng, best = Random(seed), assignment
        for _ in range(self.reach):
            trial = best.copy()
            trial[rng.randrange(self.num_devices)] = rng.randrange(self.num_stages)
            best = min(best, trial, key=self.cost)
        self.found.append(self.cost(best))
        return Improved(assignment=best, cost=self.cost(best), work=work)


WEIGHTS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
WORK = 1_500_000


def test_it_gets_where_its_local_search_alone_does_not():
    best = (sum(WEIGHTS) / 4) ** 2 * 4
    found = evolve(Teams(WEIGHTS, 4), seed=1, work=4 * WORK)
    alone = min(
        Teams(WEIGHTS, 4).improve(Teams(WEIGHTS, 4).random(seed), seed=seed, work=1, heat=1.0).cost
        for seed in range(12)
    )
    assert found.cost == best < alone


def test_the_same_seed_is_the_same_search_and_more_work_continues_it():
    def searched(seed, work):
        teams = Teams(WEIGHTS, 4)
        return evolve(teams, seed=seed, work=work), teams.found

    (short, tried), (again, tried_again) = searched(5, WORK), searched(5, WORK)
    assert (short.assignment == again.assignment).all()
    assert tried == tried_again
    longer, tried_longer = searched(5, 3 * WORK)
    assert tried_longer[: len(tried)] == tried
    assert longer.cost <= short.cost
    assert searched(6, WORK)[1] != tried


def test_what_is_found_is_the_best_that_was_tried():
    teams = Teams(WEIGHTS, 4)
    found = evolve(teams, seed=2, work=WORK)
    assert min(teams.found) == found.cost == teams.cost(found.assignment)


def test_what_one_starts_with_is_improved_without_heat_first_and_never_made_worse():
    teams = Teams(WEIGHTS, 4)
    start = [teams.random(seed) for seed in range(2)]
    found = evolve(teams, seed=0, work=WORK, start=start)
    assert [heat for _, heat in teams.calls[:2]] == [0.0, 0.0]
    assert found.cost <= min(teams.cost(each) for each in start)
    assert evolve(teams, seed=0, work=0, start=start).cost == min(teams.cost(each) for each in start)


def test_without_work_or_start_there_is_still_a_plan():
    teams = Teams(WEIGHTS, 4)
    found = evolve(teams, seed=0, work=0)
    assert (found.assignment >= 0).all()
    assert len(teams.calls) == 1


def test_no_call_gets_more_work_than_is_left():
    teams = Teams(WEIGHTS, 4)
    teams.share = 50_000
    evolve(teams, seed=0, work=120_000)
    works = [work for work, _ in teams.calls]
    assert works[0] == 50_000
    assert works[-1] < 50_000


def test_of_several_random_starts_the_cheapest_is_improved_and_all_are_paid_for():
    teams, drawn, begun = Teams(WEIGHTS, 4), [], []
    draw, improve = teams.random, teams.improve
    teams.draws = 5
    teams.random = lambda seed: drawn.append(draw(seed)) or drawn[-1]
    teams.improve = lambda assignment, **says: begun.append(assignment) or improve(assignment, **says)
    evolve(teams, seed=3, work=WORK)
    assert begun[0] is min(drawn[:5], key=teams.cost)
    assert begun[0] is not drawn[0]
    one_each = Teams(WEIGHTS, 4)
    evolve(one_each, seed=3, work=WORK)
    assert len(teams.calls) < len(one_each.calls)
    drawn.clear()
    evolve(teams, seed=3, work=teams.share // 4)
    assert len(drawn) == 1, "something is left to improve it with"


def test_a_perturbed_assignment_names_no_stage_that_is_not_and_leaves_its_parent_alone():
    first = np.arange(24, dtype=np.int64) % 4
    before = first.copy()
    children = [perturbed(first, 4, Random(seed)) for seed in range(300)]
    assert (first == before).all()
    assert all(((child >= HOMELESS) & (child < 4)).all() for child in children)
    assert len({child.tobytes() for child in children}) > 200
    assert any((child == HOMELESS).any() for child in children)


def test_a_single_device_ends_too():
    assert evolve(Teams([1], 1), seed=0, work=WORK).cost == 1.0
