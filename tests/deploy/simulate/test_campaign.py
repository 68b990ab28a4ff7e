"""A campaign's seed is one history; what breaks an invariant is found and told so that it can be seen again."""

import asyncio
import dataclasses

import campaign_run as campaign
import msgspec
import pytest
from campaign_report import failure, json_line, one_line, replay_command, summary
from campaign_run import run_trial
from sightings import Failed
from sim_faults import Fault, FaultKind
from sim_swarm import SimSwarm
from tiny_run import tiny_spec
from trial import CampaignOptions, Trial, draw_trial, parse_kinds, parse_wire
from witness import RunVerdict, RunWitness

from shoal.peer.membership import learner
from shoal.protocol.errors import LocalError

SHORT = CampaignOptions(peers=6, steps=6, fault_s=10.0, mean_gap_s=4.0)


def quiet_trial(**changes: object) -> Trial:
    trial = dataclasses.replace(draw_trial(0, SHORT), schedule=(), spec=tiny_spec(steps=4, peers=6))
    return dataclasses.replace(trial, **changes)  # type: ignore[arg-type]


def test_a_trial_follows_from_its_seed() -> None:
    assert draw_trial(7, SHORT) == draw_trial(7, SHORT)
    assert draw_trial(7, SHORT) != draw_trial(8, SHORT)
    assert all(fault.ends_s <= SHORT.fault_s for seed in range(50) for fault in draw_trial(seed, SHORT).schedule)


@pytest.mark.sim
def test_a_run_without_faults_is_one_history_and_breaks_nothing() -> None:
    first, again = run_trial(quiet_trial()).verdict, run_trial(quiet_trial()).verdict
    assert (first.broken, first.detail) == (None, "")
    assert first.trace_hash == again.trace_hash
    assert (first.steps, first.microbatches, first.duplicates, first.given_up) == (4, 4 * 6 * 3, 0, 0)
    assert run_trial(quiet_trial(seed=1)).verdict.trace_hash != first.trace_hash


@pytest.mark.sim
def test_a_run_with_placed_experts_breaks_nothing_either() -> None:
    options = CampaignOptions(peers=6, stages=2, steps=8, experts=4, fault_s=12.0, mean_gap_s=4.0)
    verdict = run_trial(draw_trial(2, options)).verdict
    assert (verdict.broken, verdict.detail) == (None, "")
    assert sum(verdict.injected.values()) > 0
    assert (verdict.steps, verdict.microbatches, verdict.given_up) == (8, 6 * 8 * (2 + 2 * 4), 0)


@pytest.mark.sim
def test_what_breaks_an_invariant_ends_the_run_and_is_the_same_again() -> None:
    async def script(swarm: SimSwarm, witness: RunWitness) -> None:
        swarm.world.failures.append(("n3", ValueError("on purpose")))

    first, again = (run_trial(quiet_trial(), script).verdict for _ in range(2))
    assert first.broken == "no handler raises and no node gives up"
    assert "n3: ValueError: on purpose" in first.detail
    assert first.steps < 4, "it went on"
    assert first.last_events[-1].endswith("n3 failed: ValueError: on purpose")
    assert (first.trace_hash, first.detail, first.last_events) == (again.trace_hash, again.detail, again.last_events)


@pytest.mark.sim
def test_a_training_that_differs_from_one_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = quiet_trial()
    losses = witness_losses(trial)
    monkeypatch.setattr("witness.single_process_losses", lambda spec: (*losses[:2], 0.0, 0.0))
    verdict = run_trial(trial).verdict
    assert verdict.broken is not None
    assert "one process" in verdict.broken
    assert "step 2 " in verdict.detail


def witness_losses(trial: Trial) -> tuple[float, ...]:
    from witness import single_process_losses

    return single_process_losses(trial.spec)


@pytest.mark.sim
def test_a_swarm_that_never_begins_is_found() -> None:
    trial = quiet_trial(spec=tiny_spec(steps=6, peers=7))
    verdict = run_trial(trial).verdict
    assert verdict.broken == f"the first step is committed within {campaign.BEGINS_S:.0f} s"


BROKEN = RunVerdict(
    seed=4711,
    broken="nothing is lost",
    detail="at 3 s: something was",
    schedule=(Fault(kind=FaultKind.CRASH, at_s=1.5, lasts_s=2.0, whom=("n1",)),),
    last_events=("    3.000 s  n1 starts",),
    trace_hash="abc",
    injected={"crash": 1},
    recoveries_s=[1.0, 3.0],
    steps=5,
    microbatches=1000,
    duplicates=2,
    training_s=10.0,
)


def test_a_failure_says_all_that_is_needed_to_see_it_again() -> None:
    text = failure(BROKEN, CampaignOptions())
    for part in (
        "seed 4711: violated: nothing is lost",
        "at 3 s: something was",
        "at 1.500 s for 2 s: crash of n1",
        "n1 starts",
        "trace abc",
        "tests/soak/campaign.py --seeds 1 --first-seed 4711\n",
    ):
        assert part in text + "\n"


def test_the_replay_command_has_what_was_not_the_default() -> None:
    options = CampaignOptions(peers=12, fault_s=30.5, kinds=(FaultKind.ONE_WAY_CUT, FaultKind.CRASH))
    command = replay_command(3, options)
    assert command == (
        "tests/soak/campaign.py --seeds 1 --first-seed 3 --peers 12 --fault-seconds 30.5 "
        '--kind "one-way cut" --kind "crash"'
    )


def test_a_summary_counts_failures_faults_recoveries_and_duplicates() -> None:
    text = summary([BROKEN, RunVerdict(seed=1)])
    assert "2, 1 failed: 4711" in text
    assert "1 crash" in text
    assert "median 2.0 s, p99 3.0 s, over 2 kills" in text
    assert "20.0 per 10,000 microbatches" in text
    assert "0.500 steps/s" in text


def test_a_line_of_json_a_seed() -> None:
    line = json_line(BROKEN)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line)["broken"] == "nothing is lost"
    assert "FAIL" in one_line(BROKEN)


def test_kinds_by_name() -> None:
    assert parse_kinds(()) == tuple(FaultKind)
    assert parse_kinds(("crash", "one-way cut")) == (FaultKind.CRASH, FaultKind.ONE_WAY_CUT)
    with pytest.raises(LocalError, match="not a fault: take some of crash"):
        parse_kinds(("flood",))


def test_failures_are_events_of_their_node() -> None:
    assert str(Failed(at_s=1.0, name="a", life=0, error="x")) == "a failed: x"


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(2))
def test_a_short_campaign(seed: int) -> None:
    """The long one is tests/soak/campaign.py."""
    options = CampaignOptions(peers=6, stages=2, steps=20, fault_s=35.0, mean_gap_s=6.0)
    verdict = campaign.run_seed(seed, options)
    assert verdict.broken is None, failure(verdict, options)
    assert verdict.steps == 20
    assert sum(verdict.injected.values()) >= 2


@pytest.mark.sim
def test_a_run_in_few_bits_breaks_nothing_either() -> None:
    options = CampaignOptions(
        peers=6, steps=8, fault_s=12.0, mean_gap_s=4.0, wire=parse_wire("int8,hadamard6,hadamard4")
    )
    verdict = run_trial(draw_trial(1, options)).verdict
    assert (verdict.broken, verdict.detail) == (None, "")
    assert sum(verdict.injected.values()) > 0
    assert (verdict.steps, verdict.microbatches) == (8, 6 * 8 * 3)
    assert "--wire int8,hadamard6,hadamard4" in replay_command(1, options)


@pytest.mark.parametrize("text", ["int8", "int8,int8", "int8,int8,int7", "int8,int8,int8,int8", ""])
def test_formats_that_do_not_exist_are_named_beside_those_that_do(text: str) -> None:
    with pytest.raises(LocalError, match=r"does not name three formats.*take some of fp32, bf16, int8"):
        parse_wire(text)


@pytest.mark.sim
def test_a_run_ends_though_a_member_is_light_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lit: list[bool] = []

    async def never(self: learner.Learner) -> None:
        lit.append(True)
        await asyncio.Event().wait()

    monkeypatch.setattr(learner, "_SMALL_BYTES", 0)
    monkeypatch.setattr(learner, "LIGHT_STATE_S", 0.0)
    monkeypatch.setattr(learner.Learner, "_gather", never)
    crash = Fault(kind=FaultKind.CRASH, at_s=2.0, lasts_s=3.0, whom=("n1",))
    trial = quiet_trial(spec=tiny_spec(steps=30, peers=2, stages=1, s_max=1), speeds={"n0": 1.0, "n1": 1.0})
    verdict = run_trial(dataclasses.replace(trial, schedule=(crash,))).verdict
    assert lit, "it came back as a light member"
    assert (verdict.broken, verdict.detail) == (None, "")
    assert verdict.steps == 30
