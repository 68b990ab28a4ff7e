"""The model asked through a swarm's stages while they train, in virtual time."""

import asyncio
import itertools

import msgspec
import pytest
import torch
from open_gate import OpenGate
from single_process import train

from shoal.deploy.visitor import swarm_model
from shoal.deploy.visitor.swarm_model import SwarmModel
from shoal.peer.data.corpus import load_corpus
from shoal.peer.data.labels import IGNORED
from shoal.peer.model import llama
from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.layout import HEAD, all_layer_keys
from shoal.peer.pipeline.fixed_stage import FixedStage
from shoal.peer.pipeline.stage import StageRuntime
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import LocalError, Refused
from shoal.protocol.messages import InferenceAnswer, InferenceRequest
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import run_id

STAGES = [["0.0", "0.1"], ["1.0", "1.1"], ["2.0", "2.1"]]
STEPS = 20


def in_one_process(spec):
    """Version -> the whole model, as one process trains it."""
    versions = {}
    corpus = load_corpus(spec.data, context=spec.model.context)

    def keep(step, params):
        copies = {key: {name: p.detach().clone() for name, p in named.items()} for key, named in params.items()}
        rotary = llama.rotary_tables(spec.model)
        how = {"rotary": rotary, "device": torch.device("cpu"), "dtype": torch.float32}
        versions[step.step + 1] = copies, FixedStage(spec.model, copies, **how)

    for _ in train(spec, corpus, steps=STEPS, on_step=keep):
        pass
    return versions


@pytest.fixture(scope="module")
def known(tiny_spec):
    return in_one_process(tiny_spec)


async def begun(make_swarm, spec, *, stages=STAGES, flop_per_s=2e8):
    swarm = make_swarm(spec, network=uniform(latency_s=0.05, rate_bytes_per_s=1e7))
    for name in itertools.chain(*stages):
        await swarm.add(name, device_flop_per_s=flop_per_s)
    return swarm


async def visitor(swarm, names=("1.0",)):
    """Somebody who holds nothing, and knows these members."""
    guest = swarm.world.add_peer("guest", device_flop_per_s=1.0)
    owner = next(iter(swarm.world.peers.values())).peer_id
    endpoint = Endpoint(guest.identity, guest.transport, run=run_id(swarm.spec, owner), gate=OpenGate())
    for other in swarm.world.peers.values():
        await guest.transport.introduce(other.peer_id, other.transport.addresses())
    return endpoint, SwarmModel(endpoint, [swarm.peer(name).peer_id for name in names], swarm.spec.model)


async def closed(swarm):
    await swarm.close()
    assert swarm.world.failures == []


def some_tokens(rows, length, *, seed=5):
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(0, 256, (rows, length + 1), generator=generator)
    return tokens_BT[:, :-1], tokens_BT[:, 1:].clone()


def far(one, other):
    return float((one - other).abs().max())


@pytest.mark.sim
def test_stages_say_what_one_process_says_at_one_version_for_as_long_as_it_is_asked(make_swarm, tiny_spec, known):
    tokens_BT, targets_BT = some_tokens(4, 32)
    targets_BT[0, :7] = IGNORED

    async def main():
        swarm = await begun(make_swarm, tiny_spec)
        swarm.obey(STAGES, not_started=True)
        await swarm.until_step(2)
        _, model = await visitor(swarm)
        answers = []
        while max(swarm.commits[2], default=0) < 12:
            answers.append(await model.log_likelihoods(tokens_BT, targets_BT))
        await closed(swarm)
        return answers, model.answered

    answers, answered = run(main())
    ((_, version),) = answered
    assert 2 <= version < 10
    assert len(answers) > 3
    with torch.inference_mode():
        of = {v: known[v][1].log_likelihoods(known[v][1].run(tokens_BT), targets_BT) for v in (version, version + 1)}
    for value_BT, likeliest_BT in answers:
        assert far(value_BT, of[version][0]) < 1e-3 < far(value_BT, of[version + 1][0])
        assert (likeliest_BT == of[version][1]).float().mean() > 0.99
        assert (value_BT[0, :7] == 0).all()
        assert likeliest_BT[0, :7].all()
    assert all(torch.equal(answers[0][0], value_BT) for value_BT, _ in answers), "the weights were not kept"


@pytest.mark.sim
@pytest.mark.parametrize("prompt", [3, 40])
def test_a_swarm_writes_what_the_model_writes_behind_its_context_too(make_swarm, tiny_spec, known, prompt):
    tokens = some_tokens(1, prompt)[0][0].tolist()

    async def main():
        swarm = await begun(make_swarm, tiny_spec)
        swarm.obey(STAGES, not_started=True)
        await swarm.until_step(3)
        _, model = await visitor(swarm)
        written = []
        async for token in model.stream(tokens, Sampler(temperature=0.7, seed=3)):
            written.append(token)
            if len(written) == 40:  # of 32 that the context has
                break
        await closed(swarm)
        return written, model.answered

    written, answered = run(main())
    ((_, version),) = answered
    expected = stream(tiny_spec.model, known[version][0], tokens, Sampler(temperature=0.7, seed=3))
    assert written == list(itertools.islice(expected, 40))


@pytest.mark.sim
def test_stages_in_a_subspace_say_and_write_what_one_process_does(make_swarm, tiny_spec):
    spec = msgspec.structs.replace(tiny_spec, model=msgspec.structs.replace(tiny_spec.model, subspace=5))
    known = in_one_process(spec)
    tokens_BT, targets_BT = some_tokens(4, 32)
    prompt = tokens_BT[0, :3].tolist()

    async def main():
        swarm = await begun(make_swarm, spec)
        swarm.obey(STAGES, not_started=True)
        await swarm.until_step(3)
        endpoint, model = await visitor(swarm)
        said = await model.log_likelihoods(tokens_BT, targets_BT)
        other = SwarmModel(endpoint, [swarm.peer("1.0").peer_id], spec.model)
        written = []
        async for token in other.stream(prompt, Sampler(temperature=0.7, seed=3)):
            written.append(token)
            if len(written) == 12:
                break
        await closed(swarm)
        return said, model.answered, written, other.answered

    (value_BT, _), ((_, said_at),), written, ((_, written_at),) = run(main())
    with torch.inference_mode():
        wanted_BT, _ = known[said_at][1].log_likelihoods(known[said_at][1].run(tokens_BT), targets_BT)
    assert far(value_BT, wanted_BT) < 1e-3
    expected = stream(spec.model, known[written_at][0], prompt, Sampler(temperature=0.7, seed=3))
    assert written == list(itertools.islice(expected, 12))


@pytest.mark.sim
def test_a_text_goes_on_where_a_stage_forgets_it_and_members_die(make_swarm, tiny_spec):
    async def main():
        swarm = await begun(make_swarm, tiny_spec)
        swarm.obey(STAGES, not_started=True)
        await swarm.until_step(2)
        _, model = await visitor(swarm, names=("1.0", "0.1"))
        written = []
        async for token in model.stream([1, 2, 3], Sampler(temperature=0.0)):
            written.append(token)
            if len(written) == 5:
                for driver in swarm.drivers.values():
                    driver.inference.free()
            if len(written) == 10:
                swarm.world.crash(swarm.peer("1.0"))
                swarm.obey([["0.0", "0.1"], ["1.1"], ["2.0", "2.1"]], not_started=False, unless=("1.0",))
            if len(written) == 20:
                break
        await swarm.until_step(STEPS)
        await closed(swarm)
        return written, model.answered

    written, answered = run(main())
    assert len(written) == 20
    assert 2 <= len(answered) <= 4


@pytest.mark.sim
def test_training_loses_nothing_by_being_asked(make_swarm, tiny_spec):
    tokens_BT, targets_BT = some_tokens(4, 32)

    async def main(asks):
        swarm = await begun(make_swarm, tiny_spec)
        swarm.obey(STAGES, not_started=True)
        _, model = await visitor(swarm)

        async def ask():
            with_answers = 0
            while True:
                try:
                    await model.log_likelihoods(tokens_BT, targets_BT)
                except LocalError:
                    return with_answers
                with_answers += 1

        asking = [asyncio.create_task(ask()) for _ in range(3 if asks else 0)]
        await swarm.until_step(STEPS)
        took_s = asyncio.get_running_loop().time()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        copies = [(held := driver.replica.runtime)._weights.copies(held.state) for driver in swarm.drivers.values()]
        await closed(swarm)
        return swarm.losses, took_s, copies

    quiet, quiet_s, _ = run(main(False))
    asked, asked_s, copies = run(main(True))
    assert asked == pytest.approx(quiet, abs=1e-5)
    assert asked_s < 1.5 * quiet_s
    assert max(copies) <= 3


@pytest.mark.sim
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tokens": b""}, "asks about 1 rows in 0 bytes"),
        ({"tokens": b"\0" * 7}, "asks about 1 rows in 7 bytes"),
        ({"tokens": bytes(4 * 33)}, "asks about tokens up to 33; the context is 32"),
        ({"tokens": bytes(4), "position": 3}, "continues tokens without a session"),
        ({"tokens": bytes(4), "position": -1}, "asks about tokens up to 0"),
        ({"tokens": b"\0\1\0\0"}, "names a token outside the vocabulary of 256"),
        ({"tokens": b"\xff\xff\xff\xff"}, "names a token outside the vocabulary"),
        ({"tokens": bytes(4), "targets": b"\0\1\0\0"}, "names a token outside the vocabulary"),
        ({"tokens": bytes(8), "targets": bytes(4)}, "asks with different numbers of tokens, targets and beginnings"),
        ({"tokens": bytes(8), "rows": 2}, "asks what follows 2 rows at once"),
        ({"tokens": bytes(8), "rows": 2, "session": 5}, "begins a session with 2 rows"),
        ({"tokens": bytes(4 * 5000), "rows": 5000}, "asks about 5000 rows"),
        ({"tokens": bytes(4), "session": 5, "position": 3}, "the cache of the tokens before is gone"),
    ],
)
def test_what_the_model_has_no_answer_to_is_refused_with_a_sentence(make_swarm, tiny_spec, wrong, said):
    async def main():
        swarm = await begun(make_swarm, tiny_spec, stages=[["0.0"], ["1.0"]])
        swarm.obey([["0.0"], ["1.0"]], not_started=True)
        await swarm.until_step(1)
        endpoint, _ = await visitor(swarm)
        request = msgspec.structs.replace(InferenceRequest(tokens=b""), **wrong)
        try:
            await endpoint.ask(swarm.peer("1.0").peer_id, request, InferenceAnswer, timeout_s=60)
        except Exception as error:
            return str(error)
        finally:
            await closed(swarm)
        return ""

    assert said in run(main())


def test_a_prompt_in_parts_is_the_same_as_at_once(tiny_spec, known):
    _, whole = known[STEPS]
    tokens_BT, targets_BT = some_tokens(1, 32)
    with torch.inference_mode():
        at_once, _ = whole.log_likelihoods(whole.run(tokens_BT), targets_BT)
        memory, parts = whole.memory(), []
        for at, length in ((0, 5), (5, 20), (25, 1), (26, 6)):
            part = slice(at, at + length)
            y_BTD = whole.run(tokens_BT[:, part], position=at, memory=memory)
            parts.append(whole.log_likelihoods(y_BTD, targets_BT[:, part])[0])
    assert far(torch.cat(parts, 1), at_once) < 1e-5


def test_candidates_are_the_likeliest_in_the_order_of_the_vocabulary(tiny_spec, known):
    params, whole = known[STEPS]
    tokens_BT, _ = some_tokens(1, 9)
    with torch.inference_mode():
        y_BTD = whole.run(tokens_BT)
        logit_V = llama.head(tiny_spec.model, params[HEAD], y_BTD)[0, -1]
        token_K, logit_K = whole.candidates(y_BTD, 10)
    assert token_K.tolist() == sorted(logit_V.topk(10).indices.tolist())
    assert far(logit_K, logit_V[token_K]) < 1e-5
    assert len(whole.candidates(y_BTD, 1000)[0]) == 256
    assert set(all_layer_keys(tiny_spec.model)) == set(params)


@pytest.mark.sim
def test_a_peer_without_memory_for_a_question_refuses_it_and_trains_on(make_swarm, tiny_spec, monkeypatch):
    async def main():
        swarm = await begun(make_swarm, tiny_spec, stages=[["0.0"], ["1.0"]])
        swarm.obey([["0.0"], ["1.0"]], not_started=True)
        await swarm.until_step(2)
        endpoint, model = await visitor(swarm)
        request = InferenceRequest(tokens=bytes(8))
        refused = []
        for method in ("fixed", "run"):
            with monkeypatch.context() as without:

                def no_memory(self, *_, **__):
                    raise MemoryError

                without.setattr(StageRuntime if method == "fixed" else FixedStage, method, no_memory)
                try:
                    await endpoint.ask(swarm.peer("1.0").peer_id, request, InferenceAnswer, timeout_s=60)
                except Refused as error:
                    refused.append(error.reason)
        answer, _ = await model.log_likelihoods(*some_tokens(1, 8))
        await swarm.until_step(STEPS)
        await closed(swarm)
        return refused, answer

    refused, answer = run(main())
    assert refused == ["a peer of a stage has no memory for the request"] * 2
    assert answer.isfinite().all()


@pytest.mark.sim
@pytest.mark.parametrize("keeps", [True, False])
def test_a_version_stays_for_who_thinks_for_a_minute_and_says_so(make_swarm, tiny_spec, keeps):
    tokens_BT, targets_BT = some_tokens(1, 32)
    spec = msgspec.structs.replace(tiny_spec, training=msgspec.structs.replace(tiny_spec.training, steps=200))

    async def main():
        swarm = await begun(make_swarm, spec, stages=[["0.0", "0.1"], ["1.0", "1.1"]])
        swarm.obey([["0.0", "0.1"], ["1.0", "1.1"]], not_started=True)
        await swarm.until_step(2)
        _, model = await visitor(swarm)
        keeping = asyncio.create_task(model.keep_version()) if keeps else None
        await model.log_likelihoods(tokens_BT, targets_BT)
        await asyncio.sleep(120)
        await model.log_likelihoods(tokens_BT, targets_BT)
        if keeping is not None:
            keeping.cancel()
        await asyncio.sleep(70)
        kept = [len(driver.inference._sessions._fixed) for driver in swarm.drivers.values()]
        await closed(swarm)
        return model.answered, kept

    answered, kept = run(main())
    assert len(answered) == (1 if keeps else 2)
    assert set(kept) == {0}, "what nobody asks for any more is dropped"


@pytest.mark.sim
def test_documents_and_rows_longer_than_a_request_go_through_stages(make_swarm, tiny_spec, known, monkeypatch):
    tokens_BT, targets_BT = some_tokens(2, 32)
    begins_BT = torch.zeros(2, 32, dtype=torch.bool)
    begins_BT[:, 0] = begins_BT[0, 9] = begins_BT[1, 30] = True

    async def main():
        swarm = await begun(make_swarm, tiny_spec, stages=[["0.0"], ["1.0"]])
        swarm.obey([["0.0"], ["1.0"]], not_started=True)
        await swarm.until_step(2)
        _, model = await visitor(swarm)
        apart, _ = await model.log_likelihoods(tokens_BT, targets_BT, begins_BT)
        monkeypatch.setattr(swarm_model, "INFERENCE_TOKENS_MAX", 7)
        in_parts, _ = await model.log_likelihoods(tokens_BT, targets_BT)
        with pytest.raises(LocalError, match="packed documents of 32 tokens"):
            await model.log_likelihoods(tokens_BT, targets_BT, begins_BT)
        await closed(swarm)
        return apart, in_parts, model.answered

    apart, in_parts, answered = run(main())
    ((_, version),) = answered
    whole = known[version][1]
    with torch.inference_mode():
        expected = whole.log_likelihoods(whole.run(tokens_BT, begins_BT=begins_BT), targets_BT)[0]
        at_once = whole.log_likelihoods(whole.run(tokens_BT), targets_BT)[0]
    assert far(apart, expected) < 1e-3
    assert far(in_parts, at_once) < 1e-3
    assert far(expected, at_once) > 0.01
