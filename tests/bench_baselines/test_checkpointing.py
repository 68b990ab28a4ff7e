import dataclasses

import pytest
from baselines.checkpointing import Account, Checkpointing, checkpointed

from shoal.deploy.simulate.modelled import Churn

SYSTEM = Checkpointing(
    samples_per_s=lambda devices: 10.0 * devices,
    samples_per_device=10,  # a step is a second
    interval_steps=50,
    save_s=10.0,
    load_s=1.0,
    detect_s=5.0,
    restart_s=20.0,
)


def add_up(account: Account) -> float:
    return account.computing_s + account.saving_s + account.restarting_s


def test_in_peace_only_saving_takes_time() -> None:
    account = checkpointed(SYSTEM, (), num_devices=4, seconds=600.0)
    assert account.saving_s == pytest.approx(100.0)
    assert account.samples == pytest.approx(500.0 * 40.0)
    assert (account.restarting_s, account.lost_samples, account.restarts) == (0.0, 0.0, 0)


def test_a_death_costs_what_is_not_saved_and_the_way_back() -> None:
    account = checkpointed(SYSTEM, (Churn(85.0, "remove", 1),), num_devices=4, seconds=200.0)
    assert account.lost_samples == pytest.approx(25.0 * 40.0)  # a checkpoint was whole at 60 s
    assert account.restarting_s == pytest.approx(5.0 + 20.0 + 3.0)
    # up at 113 s with three: 50 s, a checkpoint, and 27 s that are not saved yet
    assert account.samples == pytest.approx(50.0 * 40.0 + 77.0 * 30.0)
    assert add_up(account) == pytest.approx(200.0)


def test_a_death_while_it_saves_costs_the_whole_interval() -> None:
    account = checkpointed(SYSTEM, (Churn(59.0, "remove", 1),), num_devices=4, seconds=60.0)
    assert account.samples == 0.0
    assert account.lost_samples == pytest.approx(2000.0)


def test_only_whole_groups_are_of_use() -> None:
    system = dataclasses.replace(SYSTEM, group_size=4)
    account = checkpointed(system, (), num_devices=10, seconds=50.0)
    assert account.samples == pytest.approx(50.0 * 80.0)
    # Two are left over: their death is nothing to it, that of a third halves it, five more end it.
    churn = tuple(Churn(at_s, "remove", device) for at_s, device in ((10.0, 9), (20.0, 8)))
    assert checkpointed(system, churn, num_devices=10, seconds=50.0).restarts == 0
    account = checkpointed(system, (*churn, Churn(30.0, "remove", 0)), num_devices=10, seconds=100.0)
    assert account.restarts == 1
    assert account.samples == pytest.approx((100.0 - 30.0 - 29.0) * 40.0)
    ended = checkpointed(system, tuple(Churn(0.5, "remove", d) for d in range(7)), num_devices=10, seconds=100.0)
    assert ended.samples == 0.0
    assert ended.restarting_s == pytest.approx(99.5)


def test_who_comes_is_taken_in_after_a_while() -> None:
    account = checkpointed(SYSTEM, (Churn(10.0, "add", 3),), num_devices=4, seconds=200.0)
    # three until 130 s, two checkpoints on the way, and one more before the restart, which takes 24 s with four
    assert account.restarts == 1
    assert account.lost_samples == 0.0
    assert account.saving_s == pytest.approx(20.0)
    assert account.restarting_s == pytest.approx(10.0 + 24.0)
    assert account.samples == pytest.approx(110.0 * 30.0 + (200.0 - 164.0) * 40.0)


def test_a_death_in_a_restart_begins_it_again() -> None:
    churn = (Churn(20.0, "remove", 0), Churn(30.0, "remove", 1))
    account = checkpointed(SYSTEM, churn, num_devices=4, seconds=100.0)
    assert account.restarts == 2
    assert account.restarting_s == pytest.approx(10.0 + 27.0)
    assert account.samples == pytest.approx((100.0 - 57.0) * 20.0)
