"""A stage whose experts are elsewhere gives what the whole stage gives, if holders of the experts answer its calls."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from shoal.peer.data.corpus import Corpus, load_corpus
from shoal.peer.model.layout import layer_layout
from shoal.peer.pipeline.expert_call import Calling, ExpertCall, JobInParts
from shoal.peer.pipeline.expert_runs import Run
from shoal.peer.pipeline.expert_shard import ExpertShard
from shoal.peer.pipeline.expert_wire import TokenWire
from shoal.peer.pipeline.microbatch import Microbatch
from shoal.peer.pipeline.shard import Shard
from shoal.peer.pipeline.stage import StageRuntime
from shoal.peer.pipeline.trunk import StageTrunk
from shoal.protocol.identity import PeerID
from shoal.protocol.ports import Payload
from shoal.protocol.spec import RunSpec

CPU = torch.device("cpu")
NUM_EXPERTS = 4
CUT = ((0, 1), (1, 3))
STEP_0 = [Microbatch(0, 0), Microbatch(0, 1)]


@pytest.fixture(scope="module")
def corpus(tiny_spec: RunSpec) -> Corpus:
    return load_corpus(tiny_spec.data, context=tiny_spec.model.context)


@pytest.fixture(params=["stash", "recompute", "qwen3_moe"])
def spec(tiny_spec: RunSpec, request: pytest.FixtureRequest) -> RunSpec:
    tables = msgspec.to_builtins(tiny_spec)
    tables["model"] |= {"num_experts": NUM_EXPERTS, "router_aux_loss": 1.0}
    if request.param == "qwen3_moe":
        tables["model"] |= {"head_size": 24, "decoder": {"qk_norm": "head", "attention_bias": "all", "window": 5}}
    else:
        tables["training"] |= {"keep": request.param}
    return msgspec.convert(tables, RunSpec)


class Holders:
    """One holder of each expert of both stages, here in this process."""

    def __init__(self, spec: RunSpec) -> None:
        self._wire = TokenWire(spec)
        self.asked: list[tuple[int, bool]] = []
        """(layer, whether it was a backward)."""
        self.shards = {
            (layers, expert): ExpertShard(spec, *layers, expert, device=CPU)
            for layers in CUT
            for expert in range(NUM_EXPERTS)
        }
        for shard in self.shards.values():
            shard.load(shard.initial_state())

    def run_of(self, microbatch: Microbatch) -> Run:
        return Run(microbatch, PeerID("sender"), 1, microbatch.index)

    def answer(self, microbatch: Microbatch, call: ExpertCall) -> Payload:
        self.asked.append((call.layer, call.backward))
        layers = next(layers for layers in CUT if call.layer in range(*layers))
        tokens = self._wire.decode(call.tokens, CPU).split(call.counts)
        gradients = self._wire.decode(call.gradients, CPU).split(call.counts) if call.gradients is not None else ()
        made = []
        for expert, x_ND in enumerate(tokens):
            shard = self.shards[layers, expert]
            if not call.backward:
                made.append(shard.forward(microbatch, call.layer, x_ND))
            elif len(x_ND):
                run = self.run_of(microbatch)
                made.append(shard.backward(run, call.layer, x_ND, gradients[expert], wanted=True))
        return self._wire.encode(torch.cat(made))


def finish(holders: Holders, microbatch: Microbatch, job: Calling[Any]) -> Any:
    parts = JobInParts(job)
    call = parts.go_on()
    while call is not None:
        assert torch.is_grad_enabled(), "a job left torch in its own mode"
        call = parts.go_on(holders.answer(microbatch, call))
    return parts.value


def named_gradients(held: Shard) -> dict[str, Tensor]:
    """Tensor name -> what step 0 has summed up for it."""
    for m in STEP_0:
        held.contribute(m)
    sizes = [layer_layout(held.spec.model, key).numel for key in held.keys]
    gradients = zip(held.keys, held.gradient_sum(0)().split(sizes), strict=True)
    return {
        name: x for key, flat_N in gradients for name, x in layer_layout(held.spec.model, key).views(flat_N).items()
    }


def test_jobs_in_parts_give_what_the_whole_layers_give(spec: RunSpec, corpus: Corpus) -> None:
    holders = Holders(spec)
    wholes = [StageRuntime(spec, *layers, corpus=corpus, device=CPU) for layers in CUT]
    trunks = [StageTrunk(spec, *layers, corpus=corpus, device=CPU) for layers in CUT]
    for stage in (*wholes, *trunks):
        stage.load(stage.initial_state())
    for m in STEP_0:
        held_out = Microbatch(0, -1 - m.index)
        validated = wholes[1].validate(held_out, wholes[0].validate(held_out, None))  # type: ignore[arg-type]
        sent = finish(holders, held_out, trunks[0].validate(held_out, None))
        assert finish(holders, held_out, trunks[1].validate(held_out, sent)) == pytest.approx(validated, abs=1e-6)
        loss, back = wholes[1].loss(m, wholes[0].forward(m, None))
        assert back is not None
        wholes[0].backward(m, back)
        sent = finish(holders, m, trunks[0].forward(m, None))
        found, back = finish(holders, m, trunks[1].loss(m, sent))
        assert finish(holders, m, trunks[0].backward(m, back)) is None
        assert found == pytest.approx(loss, abs=1e-6)
        for shard in holders.shards.values():
            shard.close(holders.run_of(m), wanted=True)
    wanted = {name: x for stage in wholes for name, x in named_gradients(stage).items()}
    got = {name: x for held in (*trunks, *holders.shards.values()) for name, x in named_gradients(held).items()}
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=1e-6)
    loads = [[stage.expert_loads.totals() for stage in stages] for stages in (wholes, trunks)]
    assert loads[0] == loads[1]


def test_a_forward_or_a_loss_asks_for_each_layer_and_a_backward_the_other_way(spec: RunSpec, corpus: Corpus) -> None:
    holders, m = Holders(spec), STEP_0[0]
    first, last = (StageTrunk(spec, *layers, corpus=corpus, device=CPU) for layers in CUT)
    for stage in (first, last):
        stage.load(stage.initial_state())
    sent = finish(holders, m, first.forward(m, None))
    _, back = finish(holders, m, last.loss(m, sent))
    finish(holders, m, first.backward(m, back))
    forth_again = [(0, False)] if spec.training.recomputes else []
    assert holders.asked == [(0, False), (1, False), (2, False), (2, True), (1, True), *forth_again, (0, True)]


def test_what_comes_back_not_finite_asks_nobody_and_counts_as_zero(spec: RunSpec, corpus: Corpus) -> None:
    holders, m = Holders(spec), STEP_0[0]
    stage = StageTrunk(spec, *CUT[0], corpus=corpus, device=CPU)
    stage.load(stage.initial_state())
    sent = finish(holders, m, stage.forward(m, None))
    nan = torch.full((spec.training.microbatch_size, spec.model.context, spec.model.dim), torch.nan)
    asked = len(holders.asked)
    assert sent
    assert finish(holders, m, stage.backward(m, bytearray(nan.numpy()))) is None
    assert len(holders.asked) == asked
    stage.contribute(m)
    assert not stage.gradient_sum(0)().any()
