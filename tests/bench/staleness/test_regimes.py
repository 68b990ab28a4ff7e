"""What the study's regimes mean, on models small enough to be worked out another way."""

import math
from collections.abc import Sequence

import msgspec
import pytest
import single_process
import torch
from layers import cut
from pipeline import play, schedule_of
from plans import Group, LightPlan
from recorder import Recorder
from regimes import steps, train
from schedule import heavy_tailed, one_by_one
from settings import HeavyTailed, Method, Paper, Run, Steps, StepsBegun
from tasks import Batch, BatchShape
from validating import validate

from shoal.kernels.optimizer import OPTIMIZERS
from shoal.peer.model.layout import LayerLayout
from shoal.peer.model.schedule import learning_rate
from shoal.protocol.spec import OptimizerSpec


def played(task, run):
    """(losses of all updates, parameters at the end)."""
    recorder = Recorder(task, run)
    regime = run.regime
    if isinstance(regime, Steps):
        plan = LightPlan(regime, run.shape.microbatches_per_step, task.keys, run.seed)
        return recorder.losses, steps(task, run, plan, recorder)
    return recorder.losses, play(task, run, schedule_of(run), recorder)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def alike(a, b):
    """But for the rounding of weights that a peer makes for itself."""
    return a.keys() == b.keys() and all(torch.allclose(a[key], b[key], rtol=0.0, atol=1e-5) for key in a)


# --- synchronous training is what it always was ---


@pytest.mark.parametrize(("name", "rate"), [("adamw", 4e-3), ("nadam", 4e-3), ("sgd", 0.05)])
def test_synchronous_steps_are_those_of_one_process(tiny, run_of, corpus, name, rate):
    task = tiny()
    optimizer = msgspec.structs.replace(task.spec.optimizer, name=name, learning_rate=rate)
    task.spec = msgspec.structs.replace(task.spec, optimizer=optimizer)
    losses, _ = played(task, run_of(task, Steps(), "pipeoptim"))
    plain = [step.loss for step in single_process.train(task.spec, corpus, steps=12)]
    assert losses == pytest.approx(plain, abs=1e-4)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("method", ["none", "pipeoptim", "calibrated", "dc", "eager"])
def test_a_share_of_zero_is_synchronous_bit_for_bit(tiny, run_of, method):
    task = tiny()
    losses, params = played(task, run_of(task, Steps()))
    same, also = played(task, run_of(task, Steps(shares=(0.0,)), method))
    assert same == losses
    assert equal(also, params)


def test_one_stage_of_the_papers_regime_is_synchronous_bit_for_bit(tiny, run_of):
    task = tiny(microbatches=1)
    losses, params = played(task, run_of(task, Steps()))
    for stash in (True, False):
        same, also = played(task, run_of(task, Paper(stages=1), "pipeoptim", stash=stash))
        assert same == losses
        assert equal(also, params)


@pytest.mark.parametrize("regime", [Paper(stages=4, synchronous=True), HeavyTailed(stages=4, in_flight=1)])
def test_one_microbatch_at_a_time_is_synchronous_in_any_number_of_stages(tiny, run_of, regime):
    task = tiny(microbatches=1)
    losses, _ = played(task, run_of(task, Steps()))
    same, _ = played(task, run_of(task, regime, "none"))
    assert same == pytest.approx(losses, abs=1e-6)


def test_synchronous_outcomes_agree_on_the_validation_loss(tiny, run_of, corpus):
    task = tiny()
    outcome = train(task, run_of(task, Steps()))
    last = {}
    list(single_process.train(task.spec, corpus, steps=12, on_step=lambda _, params: last.update(params)))
    assert outcome.validation_loss == pytest.approx(validate(task.spec, corpus, last), abs=1e-3)
    assert [point.updates for point in outcome.curve] == [4, 8, 12]
    assert outcome.units == 12 * 4 * 2 * 32
    assert outcome.staleness_mean == 0


# --- steps of many microbatches ---


def test_stale_microbatches_compute_with_what_was_predicted_a_version_ago(tiny, run_of):
    """Worked out with the optimizer's kernels alone: half of each step at w_t, half at the prediction from w_{t-1}."""
    task = tiny(updates=5)
    run = run_of(task, Steps(shares=(0.5,)), "pipeoptim")
    losses, params = played(task, run)
    o = task.spec.optimizer
    state = {key: (p := task.initial(key), *OPTIMIZERS[o.name].moments(p)) for key in task.keys}

    def settings(key: str, version: int):
        return {
            "learning_rate": learning_rate(o, version, 5),
            "beta1": o.beta1,
            "beta2": o.beta2,
            "epsilon": o.epsilon,
            "weight_decay": o.weight_decay,
            "num_decayed": task.layout(key).num_decayed,
            "step": version,
        }

    ahead = {}
    for t in range(5):
        total, gradients = 0.0, {key: torch.zeros_like(state[key][0]) for key in task.keys}
        for index in range(4):
            weights = ahead if index < 2 and t > 0 else {key: state[key][0] for key in task.keys}
            leaves = {key: task.layout(key).leaves(weights[key], gradients[key]) for key in task.keys}
            x, targets = task.microbatch(t, index)
            loss = task.loss(task.run(task.keys, leaves, x), targets)
            torch.autograd.backward(loss / 4)
            total += loss.item() / 4
        assert losses[t] == pytest.approx(total, abs=1e-5)
        for key in task.keys:
            predicted_N = OPTIMIZERS[o.name].predict(*state[key], staleness_steps=1, **settings(key, t))
            norm = float(gradients[key].norm())
            gradients[key] *= min(1.0, o.clip_norm / (norm + 1e-6))
            ahead[key] = predicted_N
            param_N, moment1_N, moment2_N = state[key]
            state[key] = OPTIMIZERS[o.name].step(param_N, gradients[key], moment1_N, moment2_N, **settings(key, t))
    for key in task.keys:
        torch.testing.assert_close(params[key], state[key][0], atol=2e-4, rtol=1e-3)


def test_a_share_says_how_many_microbatches_are_stale():
    plan = LightPlan(Steps(shares=(0.25, 0.25), waiting=1.0), 8, ("a",), 0)
    every = tuple(range(8))
    assert plan.groups(0) == (Group(every, (0,)),), "before the first step there is nothing older"
    assert plan.groups(1) == (Group((0, 1, 2, 3), (1,), every), Group((4, 5, 6, 7), (0,)))
    assert plan.groups(7) == (Group((0, 1), (2,), every), Group((2, 3), (1,), every), Group((4, 5, 6, 7), (0,)))


def test_what_begins_synchronously_is_stale_later():
    plan = LightPlan(StepsBegun(shares=(1.0,), steps_a_kill=1.0, synchronous_steps=3), 4, ("a",), 0)
    assert [plan.groups(step)[0].staleness for step in range(1, 5)] == [(0,), (0,), (1,), (1,)]


def test_a_member_has_seen_what_it_computed_itself_and_what_had_ended():
    def seen(**regime):
        plan = LightPlan(Steps(**regime), 16, ("a",), 0)
        return [(len(group.indices), group.seen) for group in plan.groups(3) if group.staleness == (1,)]

    assert seen(shares=(0.25,), waiting=1.0, replicas=4) == [(1, (r, r + 4, r + 8, r + 12)) for r in range(4)]
    assert seen(shares=(0.25,)) == [(4, tuple(range(12)))]
    assert seen(shares=(1.0,)) == [(16, ())], "with everything in flight there is no room for fresher weights"
    assert seen(shares=(0.5,), waiting=0.5) == [(8, tuple(range(12)))]
    # Half of them early: 8, then 12 of the 16 have ended.
    assert seen(shares=(0.5,)) == [(4, tuple(range(8))), (4, tuple(range(12)))]


def test_who_has_seen_all_of_a_step_trains_as_if_nothing_were_stale(tiny, run_of):
    """One member whose reduction takes a whole step's time: eager weights are the next version's, but for rounding."""
    task = tiny()

    def params(method="eager", **regime):
        return played(task, run_of(task, Steps(**regime), method))[1]

    synchronous = params()
    assert alike(params(shares=(1.0,), waiting=1.0), synchronous)
    assert not alike(params("pipeoptim", shares=(1.0,), waiting=1.0), synchronous)
    assert not alike(params(shares=(1.0,), waiting=1.0, replicas=2), synchronous)


def test_after_a_kill_all_of_the_next_step_is_as_stale_as_may_be_and_comes_late():
    regime = Steps(shares=(0.25,), steps_a_kill=5)
    plan, peace = LightPlan(regime, 8, ("a",), 3), LightPlan(Steps(shares=(0.25,)), 8, ("a",), 3)
    kills = [step for step in range(200) if plan.kills(step)]
    assert 25 < len(kills) < 55
    for step in range(1, 200):
        stale = sum(len(group.indices) for group in plan.groups(step) if group.staleness == (1,))
        assert stale == (8 if step - 1 in kills else 2)
    assert plan.ends_s(199) > peace.ends_s(199)


def test_what_is_let_in_early_saves_its_time_and_no_more_than_there_is_to_save():
    ends_s = [LightPlan(Steps(shares=(share,)), 64, ("a",), 0).ends_s(99) for share in (0.0, 0.25, 0.5, 1.0)]
    assert ends_s[0] > ends_s[1] > ends_s[2] >= ends_s[3]
    assert ends_s[3] >= 100 * 64 * Steps().slot_s - 1e-6


# --- one microbatch an update ---


@pytest.mark.parametrize("stages", [1, 2, 8])
def test_stage_k_of_the_papers_pipeline_is_stages_minus_one_minus_k_behind(stages):
    actions = one_by_one(stages, 30)
    for action in actions:
        if action.kind == "F":
            assert action.staleness == min(stages - 1 - action.stage, action.microbatch)


def begun(count):
    """Schedules of four stages and forty microbatches, of which the first `count` are alone."""
    return (
        one_by_one(4, 40, begins_synchronously=count),
        heavy_tailed(4, 40, in_flight=9, hop_s=0.5, tail=1.5, seed=1, begins_synchronously=count),
    )


@pytest.mark.parametrize("number", [0, 1], ids=["paper", "heavy-tailed"])
def test_a_pipeline_that_begins_synchronously_is_stale_from_the_microbatch_on_that_is_said(number):
    late = [action for action in begun(12)[number] if action.staleness > 0]
    assert min(action.microbatch for action in late) == 13, "number 12 is the first that others follow at once"
    assert {action.stage for action in late} >= {0, 1, 2}
    assert begun(40)[number] == begun(99)[number]
    assert all(action.staleness == 0 for action in begun(40)[number])


@pytest.mark.parametrize("actions", [*begun(0), *begun(12)], ids=["paper", "heavy-tailed", "begun", "heavy, begun"])
def test_a_schedule_passes_the_dry_run(actions):
    """Everything once, nothing before what it needs, one thing at a time on each device."""
    ended: dict[tuple[int, str, int], float] = {}
    free_s = [0.0] * 4
    for action in actions:
        stage, m = action.stage, action.microbatch
        needs = {"F": (stage - 1, "F", m), "B": (stage + 1, "B", m)}[action.kind]
        if action.kind == "B" and stage == 3:
            needs = (3, "F", m)
        took_s = 1.0 if action.kind == "F" else 2.0
        assert needs[0] < 0 or ended[needs] <= action.ended_at_s - took_s + 1e-9
        assert free_s[stage] <= action.ended_at_s - took_s + 1e-9
        free_s[stage] = ended[stage, action.kind, m] = action.ended_at_s
    assert len(ended) == len(actions) == 2 * 4 * 40


def test_heavy_tails_make_microbatches_overtake_each_other_the_same_way_twice():
    draws = [heavy_tailed(4, 60, in_flight=12, hop_s=0.5, tail=1.5, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    backwards = [action.microbatch for action in draws[0] if action.kind == "B" and action.stage == 0]
    assert backwards != sorted(backwards) == list(range(60))
    open_now = most = 0
    for action in draws[0]:
        if action.stage == 0:
            open_now += 1 if action.kind == "F" else -1
            most = max(most, open_now)
    assert most == 12


class Chain:
    """y = x w0 w1 w2 w3, loss (y - 1)² / 2: gradients of a pipeline that one can write down. Implements `Task`."""

    keys = ("embed", "layers.0", "layers.1", "head")
    shape = BatchShape(microbatches_per_step=1, microbatch_size=1)
    unit = "samples"
    units_per_sample = 1
    chunk_samples = 1

    def layout(self, key: str) -> LayerLayout:
        return LayerLayout(key=key, names=("w",), shapes=((1,),), num_decayed=1)

    def initial(self, key: str) -> torch.Tensor:
        return torch.tensor([0.9, 0.8, 1.1, 0.7])[self.keys.index(key)].reshape(1).clone()

    def microbatch(self, step: int, index: int) -> Batch:
        return torch.tensor([1.0 + 0.1 * math.sin(step)]), torch.ones(1)

    def validation(self, *, brief: bool) -> Sequence[Batch]:
        return [self.microbatch(0, 0)]

    def run(self, keys, leaves, x):
        for key in keys:
            x = x * leaves[key]["w"]
        return x

    def loss(self, y, targets):
        return (y - targets).square().sum() / 2

    def correct(self, y, targets) -> float:
        return 0.0


@pytest.mark.parametrize("stash", [True, False])
def test_a_pipeline_without_stash_meets_the_weights_of_its_backward(stash):
    """Two stages of two factors. Stage 0 forwards microbatch t at version t - 1, both go backward at version t."""
    rate, updates = 0.3, 6
    optimizer = OptimizerSpec(
        name="sgd", beta1=0.0, learning_rate=rate, warmup_steps=0, final_learning_rate_fraction=1.0,
        weight_decay=0.0, clip_norm=0.0,
    )  # fmt: skip
    run = Run(
        task="chain", shape=Chain.shape, regime=Paper(stages=2), method=Method(name="none", stash=stash),
        optimizer=optimizer, updates=updates, validate_every=1,
    )  # fmt: skip
    task = Chain()
    losses, params = played(task, run)
    w, before = [0.9, 0.8, 1.1, 0.7], [0.9, 0.8, 1.1, 0.7]
    for t in range(updates):
        x = 1.0 + 0.1 * math.sin(t)
        f = [before[0], before[1], w[2], w[3]]  # of the forward
        b = f if stash else w
        h1, h2, h3, h4 = x * f[0], x * f[0] * f[1], x * f[0] * f[1] * f[2], x * f[0] * f[1] * f[2] * f[3]
        error = h4 - 1
        d3 = error * b[3]
        d2 = d3 * b[2]
        d1 = d2 * b[1]
        assert losses[t] == pytest.approx(error**2 / 2, abs=1e-6)
        before = w
        w = [w[0] - rate * d1 * x, w[1] - rate * d2 * h1, w[2] - rate * d3 * h2, w[3] - rate * error * h3]
    assert [float(params[key]) for key in task.keys] == pytest.approx(w, abs=1e-6)


def test_the_papers_prediction_is_made_from_each_stages_own_version(tiny, run_of):
    """Stashed, so each gradient is that of one model whose stages are predicted from versions t - s: no pipeline."""
    task = tiny(microbatches=1, updates=8)
    losses, _ = played(task, run_of(task, Paper(stages=4), "pipeoptim"))
    o = task.spec.optimizer
    kernels = OPTIMIZERS[o.name]
    staleness = {key: 3 - stage for stage, keys in enumerate(cut(task.keys, 4)) for key in keys}
    history = [{key: (p := task.initial(key), *kernels.moments(p)) for key in task.keys}]

    def settings(key, version):
        return {
            "learning_rate": learning_rate(o, version, 8), "beta1": o.beta1, "beta2": o.beta2, "epsilon": o.epsilon,
            "weight_decay": o.weight_decay, "num_decayed": task.layout(key).num_decayed, "step": version,
        }  # fmt: skip

    for t in range(8):
        weights, gradients = {}, {}
        for key in task.keys:
            s = min(staleness[key], t)
            weights[key] = kernels.predict(*history[t - s][key], staleness_steps=s, **settings(key, t - s))
            gradients[key] = torch.zeros_like(weights[key])
        leaves = {key: task.layout(key).leaves(weights[key], gradients[key]) for key in task.keys}
        x, targets = task.microbatch(t, 0)
        loss = task.loss(task.run(task.keys, leaves, x), targets)
        loss.backward()
        assert losses[t] == pytest.approx(loss.item(), abs=2e-4)
        after = {}
        for key in task.keys:
            gradient_N = gradients[key] * min(1.0, o.clip_norm / (float(gradients[key].norm()) + 1e-6))
            param_N, moment1_N, moment2_N = history[t][key]
            after[key] = kernels.step(param_N, gradient_N, moment1_N, moment2_N, **settings(key, t))
        history.append(after)


def test_staleness_costs_and_every_compensation_trains(tiny, run_of):
    task = tiny(microbatches=1, updates=24)
    regime = HeavyTailed(stages=4, in_flight=8)
    ends = {}
    for name in ("none", "stash", "spectrain", "pipeoptim", "lookahead", "calibrated", "dc", "eager"):
        losses, _ = played(task, run_of(task, regime, name))
        assert losses[-1] < losses[0] - 0.1
        ends[name] = losses
    outcomes = [train(task, run_of(task, its, "stash")) for its in (regime, Paper(stages=4, synchronous=True))]
    assert outcomes[0].validation_loss > outcomes[1].validation_loss
    assert outcomes[0].staleness_mean > 2
    assert ends.pop("eager") == ends["pipeoptim"], "of one microbatch a step nobody sees a part"
    assert len({tuple(losses) for losses in ends.values()}) == len(ends)


def test_a_run_that_goes_to_infinity_is_told_as_one(tiny, run_of):
    task = tiny(updates=40)
    run = run_of(task, Steps())
    wild = msgspec.structs.replace(
        run, optimizer=OptimizerSpec(name="sgd", learning_rate=1e6, clip_norm=0.0, warmup_steps=0, weight_decay=10.0)
    )
    outcome = train(task, wild)
    assert outcome.validation_loss is None
    assert outcome.units < 40 * 4 * 2 * 32
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=type(outcome)) == outcome
