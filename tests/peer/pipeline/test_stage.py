"""StageRuntime against torch's own autograd on the uncut model, and what it keeps and for how long.

This file is long because cut and sum are both checked on the one small pipeline that it builds. Which weights a
microbatch gets: test_stage_weights.py.

B samples   T tokens   D width   N parameters of a stage or of the model
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.data.microbatch import microbatch as training_microbatch
from shoal.peer.data.microbatch import validation_microbatch
from shoal.peer.model import llama
from shoal.peer.model.layout import all_layer_keys, layer_layout
from shoal.peer.model.state import StageState, initial_state
from shoal.peer.pipeline.contributions import HELD_OUT_MAX
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.spec import DataSpec, RunSpec

CPU = torch.device("cpu")
LAYERS = 3
CUTS = [cut for count in range(LAYERS) for cut in itertools.combinations(range(1, LAYERS), count)]
"""Every way of cutting three decoder layers into stages; () leaves the model whole."""


@pytest.fixture(scope="module")
def corpus(tiny_spec: RunSpec) -> Corpus:
    return load_corpus(tiny_spec.data, context=tiny_spec.model.context)


@pytest.fixture
def spec(tiny_spec: RunSpec) -> RunSpec:
    return trained_with(tiny_spec, s_max=2)


def trained_with(spec: RunSpec, **fields: Any) -> RunSpec:
    return msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, **fields))


def stages(spec: RunSpec, corpus: Corpus, cut: tuple[int, ...]) -> list[StageRuntime]:
    """Fresh ones at version 0."""
    bounds = [0, *cut, LAYERS]
    made = []
    for first, last in itertools.pairwise(bounds):
        runtime = StageRuntime(spec, first, last, corpus=corpus if first == 0 else None, device=CPU)
        runtime.load(initial_state(spec, runtime.keys, CPU))
        made.append(runtime)
    return made


def loss(runtime: StageRuntime, microbatch: Microbatch, payload: Any, **how: bool) -> tuple[float, bytearray | None]:
    """And tell the others."""
    result = runtime.loss(microbatch, payload, **how)
    runtime.contribute(microbatch)
    return result


def backward(runtime: StageRuntime, microbatch: Microbatch, payload: Any) -> bytearray | None:
    """And tell the others."""
    result = runtime.backward(microbatch, payload)
    runtime.contribute(microbatch)
    return result


def run(pipeline: list[StageRuntime], microbatch: Microbatch) -> float:
    """Through all stages and back. Returns: the loss."""
    payload: Any = None
    for runtime in pipeline[:-1]:
        payload = runtime.forward(microbatch, payload)
    value, payload = loss(pipeline[-1], microbatch, payload)
    for runtime in reversed(pipeline[:-1]):
        payload = backward(runtime, microbatch, payload)
    assert payload is None
    return value


def commit(pipeline: list[StageRuntime], step: int, count: int) -> None:
    for runtime in pipeline:
        runtime.step(runtime.gradient_sum(step)() / count)


def gradient(pipeline: list[StageRuntime], step: int) -> Tensor:
    return torch.cat([runtime.gradient_sum(step)() for runtime in pipeline])


def uncut(
    spec: RunSpec, corpus: Corpus, state: dict[str, Tensor], microbatches: list[Microbatch]
) -> tuple[list[float], Tensor]:
    """The losses and the summed gradient [N] by torch's autograd on the whole model. `state`: parameters by layer."""
    flats = {key: param_N.clone().requires_grad_() for key, param_N in state.items()}
    params = {key: layer_layout(spec.model, key).views(flat_N) for key, flat_N in flats.items()}
    losses = []
    for microbatch in microbatches:
        tokens_BT, labels = training_microbatch(corpus, spec, microbatch.step, microbatch.index)
        logits = llama.run_layers(spec.model, list(params), params, tokens_BT, llama.rotary_tables(spec.model))
        loss = llama.loss(logits, labels.targets_BT)
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
    return losses, torch.cat([flat_N.grad for flat_N in flats.values() if flat_N.grad is not None])


def parameters(pipeline: list[StageRuntime]) -> dict[str, Tensor]:
    return {k: layer.param_N for r in pipeline for k, layer in (r.state.layers.items() if r.state else ())}


STEP_0 = [Microbatch(0, 0), Microbatch(0, 1)]


# --- the same as uncut ---


@pytest.mark.parametrize("keep", ["stash", "recompute"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cut_anywhere_losses_and_gradients_are_those_of_the_uncut_model(
    spec: RunSpec, corpus: Corpus, cut: tuple[int, ...], keep: str
) -> None:
    spec = trained_with(spec, keep=keep)
    pipeline = stages(spec, corpus, cut)
    assert tuple(k for runtime in pipeline for k in runtime.keys) == all_layer_keys(spec.model)
    losses, gradient_N = uncut(spec, corpus, parameters(pipeline), STEP_0)
    assert [run(pipeline, m) for m in STEP_0] == pytest.approx(losses, abs=1e-6)
    torch.testing.assert_close(gradient(pipeline, 0), gradient_N, rtol=0, atol=1e-6)


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
def test_cut_anywhere_three_steps_lead_to_the_same_weights(spec: RunSpec, corpus: Corpus, cut: tuple[int, ...]) -> None:
    made = []
    for pipeline in (stages(spec, corpus, ()), stages(spec, corpus, cut)):
        for step in range(3):
            for index in range(2):
                run(pipeline, Microbatch(step, index))
            commit(pipeline, step, 2)
        made.append(torch.cat(list(parameters(pipeline).values())))
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-6)


def test_the_order_of_microbatches_in_flight_does_not_matter_to_any_of_them(spec: RunSpec, corpus: Corpus) -> None:
    """Three forwards, then their backwards the other way round: each keeps what is its own."""
    first, last = stages(spec, corpus, (1,))
    ms = [Microbatch(0, i) for i in range(3)]
    sent = {m: first.forward(m, None) for m in ms}
    for m in reversed(ms):
        _, back = loss(last, m, sent[m])
        assert back is not None
        backward(first, m, back)
    _, gradient_N = uncut(spec, corpus, parameters([first, last]), ms)
    torch.testing.assert_close(gradient([first, last], 0), gradient_N, rtol=0, atol=1e-6)


def test_recomputing_gives_the_bits_that_stashing_gives(spec: RunSpec, corpus: Corpus) -> None:
    made = []
    for keep in ("stash", "recompute"):
        pipeline = stages(trained_with(spec, keep=keep), corpus, (1, 2))
        for step in range(2):
            for index in range(2):
                run(pipeline, Microbatch(step, index))
                run(pipeline, Microbatch(step + 1, index))  # one step ahead: with predicted weights
            commit(pipeline, step, 2)
        made.append((*(r.state.digest() for r in pipeline if r.state), gradient(pipeline, 2)))
    assert made[0][:-1] == made[1][:-1]
    assert torch.equal(made[0][-1], made[1][-1])


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_what_jobs_say_of_their_arithmetic_is_what_torch_counts(spec: RunSpec, corpus: Corpus, keep: str) -> None:
    first, middle, last = stages(trained_with(spec, keep=keep), corpus, (1, 2))
    m, counted = Microbatch(0, 0), {}

    def count(job: str, work: Callable[[], Any]) -> Any:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            value = work()
        counted[job] = counter.get_total_flops()
        return value

    activation = first.forward(m, None)
    sent = count("forward", lambda: middle.forward(m, activation))
    count("validate", lambda: last.validate(Microbatch(0, -1), sent))
    _, back = count("loss", lambda: loss(last, m, sent))
    count("backward", lambda: backward(middle, m, back))
    assert counted["backward"] / counted["forward"] == middle.flop.backward / middle.flop.forward
    assert counted["loss"] / counted["validate"] == last.flop.loss / last.flop.forward == 3.0


def test_recomputing_keeps_only_the_input_until_the_backward(spec: RunSpec, corpus: Corpus) -> None:
    kept_bytes = {}
    for keep in ("stash", "recompute"):
        first = stages(trained_with(spec, keep=keep), corpus, (2,))[0]
        saved: list[Tensor] = []

        def save(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            first.forward(Microbatch(0, 0), None)
        assert first.state is not None
        storages = {layer.param_N.untyped_storage().data_ptr() for layer in first.state.layers.values()}
        kept_bytes[keep] = sum(t.nbytes for t in saved if t.untyped_storage().data_ptr() not in storages)
        assert (first._contexts[Microbatch(0, 0)].kept is None) == (keep == "recompute")
    activation_bytes = 2 * 32 * 32 * 4
    assert kept_bytes["stash"] > 10 * activation_bytes
    assert kept_bytes["recompute"] == 0


def test_validation_is_the_loss_of_the_committed_weights_and_leaves_no_trace(spec: RunSpec, corpus: Corpus) -> None:
    pipeline = stages(spec, corpus, (1, 2))
    run(pipeline, Microbatch(0, 0))
    commit(pipeline, 0, 1)
    before = [runtime.gradient_sum(1)().clone() for runtime in stages(spec, corpus, (1, 2))]
    payload: Any = None
    for runtime in pipeline:
        payload = runtime.validate(Microbatch(1, -2), payload)
    params = {k: layer_layout(spec.model, k).views(flat_N) for k, flat_N in parameters(pipeline).items()}
    tokens_BT, labels = validation_microbatch(corpus, spec, 1)
    logits = llama.run_layers(spec.model, list(params), params, tokens_BT, llama.rotary_tables(spec.model))
    assert payload == pytest.approx(float(llama.loss(logits, labels.targets_BT)), abs=1e-6)
    for runtime, sum_N in zip(pipeline, before, strict=True):
        assert torch.equal(runtime.gradient_sum(1)(), sum_N)
        assert not runtime._contexts


# --- the sum ---


def test_a_step_leaves_the_state_it_stepped_from_alone(spec: RunSpec, corpus: Corpus) -> None:
    pipeline = stages(spec, corpus, (1,))
    before = [runtime.state for runtime in pipeline]
    digests = [state.digest() for state in before if state]
    run(pipeline, Microbatch(0, 0))
    commit(pipeline, 0, 1)
    assert [state.digest() for state in before if state] == digests
    assert [runtime.version for runtime in pipeline] == [1, 1]
    assert all(runtime.state is not state for runtime, state in zip(pipeline, before, strict=True))


def test_a_step_skips_layers_whose_gradient_is_not_finite_and_says_how_many(spec: RunSpec, corpus: Corpus) -> None:
    (runtime,) = stages(spec, corpus, ())
    run([runtime], Microbatch(0, 0))
    mean_N = runtime.gradient_sum(0)().clone()
    mean_N[runtime._spans["layers.1"]] = float("nan")
    before = runtime.state
    state, digest, skipped = runtime.step(mean_N)
    assert before is not None
    assert skipped == 1
    assert digest == state.digest()
    changed = [key for key in runtime.keys if state.layers[key].digest() != before.layers[key].digest()]
    assert changed == [key for key in runtime.keys if key != "layers.1"]


def test_of_a_step_without_contributions_the_sum_is_zero(spec: RunSpec, corpus: Corpus) -> None:
    for runtime in stages(spec, corpus, (1,)):
        assert not runtime.gradient_sum(0)().any()


def poisoned(payload: bytearray, value: float) -> bytearray:
    """The first number of the tensor is `value`."""
    torch.frombuffer(payload, dtype=torch.float32)[0] = value
    return payload


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_a_gradient_that_is_not_finite_never_enters_the_sum(
    spec: RunSpec, corpus: Corpus, keep: str, value: float
) -> None:
    first, middle, last = stages(trained_with(spec, keep=keep), corpus, (1, 2))
    m = Microbatch(0, 0)
    _, back = loss(last, m, middle.forward(m, first.forward(m, None)))
    assert back is not None
    back = backward(middle, m, poisoned(back, value))
    assert back is not None
    assert not any(back), "the stage before must not get it either"
    assert not middle.gradient_sum(0)().any()


@pytest.fixture
def chat_spec(spec: RunSpec, tmp_path: Path) -> RunSpec:
    rows = [f'{{"prompt": "{i}? ", "completion": "{"y" * (i % 9)}"}}\n' for i in range(99)]
    (tmp_path / "chat.jsonl").write_text("".join(rows))
    return msgspec.structs.replace(spec, data=DataSpec(source=str(tmp_path / "chat.jsonl"), format="chat"))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e9])
def test_a_weight_that_is_none_teaches_nothing(chat_spec: RunSpec, weight: float) -> None:
    first, last = stages(chat_spec, load_corpus(chat_spec.data, context=chat_spec.model.context), (1,))
    m = Microbatch(0, 0)
    payload = first.forward(m, None)
    torch.frombuffer(payload, dtype=torch.float32)[-1] = weight
    nats, back = loss(last, m, payload)
    assert nats != nats
    assert back is not None
    assert not any(back)
    assert not last.gradient_sum(0)().any()


def test_a_microbatch_without_an_answer_has_no_loss_and_no_gradient(chat_spec: RunSpec) -> None:
    first, last = stages(chat_spec, load_corpus(chat_spec.data, context=chat_spec.model.context), (1,))
    m = Microbatch(0, 0)
    payload = first.forward(m, None)
    num = chat_spec.training.microbatch_size * chat_spec.model.context
    torch.frombuffer(payload, dtype=torch.int32)[-num - 1 : -1] |= (1 << 30) - 1
    nats, back = loss(last, m, payload)
    assert nats == 0.0
    assert back is not None
    assert not any(back)
    assert not last.gradient_sum(0)().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_activation_that_is_not_finite_teaches_nothing(spec: RunSpec, corpus: Corpus, value: float) -> None:
    first, last = stages(spec, corpus, (1,))
    m = Microbatch(0, 0)
    nats, back = loss(last, m, poisoned(first.forward(m, None), value))
    assert nats != nats
    assert back is not None
    assert not any(back)
    assert not last.gradient_sum(0)().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_an_activation_that_is_not_finite_freezes_no_stage_on_its_way(
    spec: RunSpec, corpus: Corpus, keep: str, value: float
) -> None:
    """Zero comes back for it, and zero times what is not finite is not zero. The next microbatch is learnt from."""
    first, middle, last = pipeline = stages(trained_with(spec, keep=keep), corpus, (1, 2))
    m = Microbatch(0, 0)
    sent = middle.forward(m, poisoned(first.forward(m, None), value))
    _, back = loss(last, m, sent)
    assert back is not None
    back = backward(middle, m, back)
    assert back is not None
    backward(first, m, back)
    assert not any(runtime.gradient_sum(0)().any() for runtime in pipeline)
    run(pipeline, Microbatch(0, 1))
    for runtime in pipeline:
        assert runtime.gradient_sum(0)().any()
        assert runtime.step(runtime.gradient_sum(0)())[2] == 0


@pytest.mark.parametrize("token", [-100, -1, 256, 2**31 - 1])
def test_a_target_that_is_no_token_teaches_nothing_and_breaks_nothing(
    spec: RunSpec, corpus: Corpus, token: int
) -> None:
    """Only its size is checked on arrival; an index outside the vocabulary would end this peer, or a GPU's context."""
    first, last = stages(spec, corpus, (1,))
    m = Microbatch(0, 0)
    payload = first.forward(m, None)
    torch.frombuffer(payload, dtype=torch.int32)[-1] = token
    nats, _ = loss(last, m, bytearray(payload))
    assert nats != nats
    assert not last.gradient_sum(0)().any()
    validated = last.validate(Microbatch(0, -1), bytearray(payload))
    assert validated != validated


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_a_straggler_does_not_change_the_sum_that_was_handed_out(spec: RunSpec, corpus: Corpus, keep: str) -> None:
    """One forwarded before the round began and one after it."""
    pipeline = first, last = stages(trained_with(spec, keep=keep), corpus, (1,))
    run(list(pipeline), Microbatch(0, 0))
    early, late = Microbatch(0, 1), Microbatch(0, 2)
    sent = first.forward(early, None)
    handed_out = [runtime.gradient_sum(0)() for runtime in pipeline]
    copies = [sum_N.clone() for sum_N in handed_out]
    _, back = loss(last, early, sent)
    assert back is not None
    backward(first, early, back)
    run(list(pipeline), late)
    assert all(torch.equal(a, b) for a, b in zip(handed_out, copies, strict=True))
    assert copies[0].any()
    for runtime in pipeline:
        runtime.step(copies[pipeline.index(runtime)])
        assert not runtime.gradient_sum(1)().any(), "nor the next step's"


@pytest.mark.parametrize("job", ["forward", "backward", "loss"])
def test_a_round_that_begins_while_a_job_runs_gets_a_sum_that_the_job_does_not_change(
    spec: RunSpec, corpus: Corpus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round begins on the loop's thread, the job runs on the device's."""
    first, last = stages(spec, corpus, (1,))
    run([first, last], Microbatch(0, 0))
    m = Microbatch(0, 1)
    runtime = last if job == "loss" else first
    handed_out: list[Tensor] = []
    plain: Callable[..., Any] = llama.run_layers

    def begin_round() -> None:
        if not handed_out:
            handed_out.extend([runtime.gradient_sum(0)(), runtime.gradient_sum(0)().clone()])

    def run_layers(*args: Any, **kwargs: Any) -> Any:
        if "backward" not in job:
            begin_round()
        return plain(*args, **kwargs)

    sent = first.forward(m, None) if job != "forward" else bytearray()
    if job == "backward":
        _, back = loss(last, m, sent)
        receive = first._boundary.receive_gradient

        def receive_gradient(*args: Any) -> Tensor:
            begin_round()
            return receive(*args)

        monkeypatch.setattr(first._boundary, "receive_gradient", receive_gradient)
        assert back is not None
        backward(first, m, back)
    else:
        monkeypatch.setattr(llama, "run_layers", run_layers)
        if job == "forward":
            _, back = loss(last, m, first.forward(m, None))
            assert back is not None
            backward(first, m, back)
        else:
            loss(last, m, sent)
    assert torch.equal(*handed_out)
    assert handed_out[0].any()


@pytest.mark.parametrize("keep", ["stash", "recompute"])
def test_a_microbatch_that_comes_again_is_not_added_again(spec: RunSpec, corpus: Corpus, keep: str) -> None:
    """After a death before us. The group counts it once, so twice in the sum would be a wrong mean."""
    pipeline = stages(trained_with(spec, keep=keep), corpus, (1, 2))
    once = stages(trained_with(spec, keep=keep), corpus, (1, 2))
    for m in STEP_0:
        run(pipeline, m)
        run(once, m)
    assert run(pipeline, STEP_0[0]) == run(once, STEP_0[0])
    run(pipeline, Microbatch(0, 2))
    expected = stages(trained_with(spec, keep=keep), corpus, (1, 2))
    for m in (*STEP_0, Microbatch(0, 2)):
        run(expected, m)
    assert torch.equal(gradient(pipeline, 0), gradient(expected, 0))


# --- states that come from elsewhere ---


def later(state: StageState, version: int) -> StageState:
    return StageState(version=version, layers=state.layers)


def test_a_loaded_state_keeps_what_was_summed_for_its_steps_and_drops_the_rest(spec: RunSpec, corpus: Corpus) -> None:
    (runtime,) = stages(spec, corpus, ())
    for step in range(3):
        run([runtime], Microbatch(step, 0))
    assert runtime.state is not None
    runtime.load(later(runtime.state, 2))
    assert runtime.gradient_sum(2)().any()
    assert sorted(runtime._contributions._sums) == [2]


def test_a_state_that_is_loaded_while_a_step_runs_stays(
    spec: RunSpec, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the group, and the step is of the state that was given up for it."""
    (runtime,) = stages(spec, corpus, ())
    run([runtime], Microbatch(0, 0))
    mean_N = runtime.gradient_sum(0)()
    assert runtime.state is not None
    loaded = later(runtime.state, 5)
    module = __import__("shoal.peer.pipeline.shard", fromlist=["step_layer_clipped"])
    plain = module.step_layer_clipped

    def step_layer_clipped(*args: Any) -> Any:
        runtime.load(loaded)
        return plain(*args)

    monkeypatch.setattr(module, "step_layer_clipped", step_layer_clipped)
    runtime.step(mean_N)
    assert runtime.state is loaded


def test_another_stages_state_is_refused(spec: RunSpec, corpus: Corpus) -> None:
    first, last = stages(spec, corpus, (1,))
    assert last.state is not None
    with pytest.raises(AssertionError, match="another stage's"):
        first.load(last.state)


def test_what_is_forgotten_is_not_kept(spec: RunSpec, corpus: Corpus) -> None:
    first, _ = stages(spec, corpus, (1,))
    first.forward(Microbatch(0, 0), None)
    first.forget(Microbatch(0, 0))
    first.forget(Microbatch(0, 1))
    assert not first._contexts


def test_what_is_kept_apart_is_in_the_sum_only_if_it_is_asked_for(spec: RunSpec, corpus: Corpus) -> None:
    (runtime,) = stages(spec, corpus, ())
    for index, held_out in ((0, False), (1, True), (2, True)):
        runtime.loss(Microbatch(0, index), None)
        assert runtime.contribute(Microbatch(0, index), held_out=held_out) is held_out
    for kept in ([0], [0, 1], [0, 2], [0, 1, 2]):
        _, gradient_N = uncut(spec, corpus, parameters([runtime]), [Microbatch(0, i) for i in kept])
        sum_N = runtime.gradient_sum(0, sum(1 << i for i in kept))()
        torch.testing.assert_close(sum_N, gradient_N, rtol=0, atol=1e-6)


def test_a_job_that_is_done_is_in_no_sum_before_the_others_are_told(spec: RunSpec, corpus: Corpus) -> None:
    """A round that begins in between must find in the sum what the tally says, and nothing else."""
    (runtime,) = stages(spec, corpus, ())
    runtime.loss(Microbatch(0, 0), None)
    assert not runtime.gradient_sum(0)().any()
    assert not runtime.contribute(Microbatch(0, 0))
    assert runtime.gradient_sum(0)().any()


def test_there_is_room_for_so_many_apart_and_no_more(spec: RunSpec, corpus: Corpus) -> None:
    (runtime,) = stages(trained_with(spec, microbatches_per_step=HELD_OUT_MAX + 2), corpus, ())
    kept = []
    for index in range(HELD_OUT_MAX + 2):
        runtime.loss(Microbatch(0, index), None)
        kept.append(runtime.contribute(Microbatch(0, index), held_out=True))
    assert kept == [True] * HELD_OUT_MAX + [False] * 2
