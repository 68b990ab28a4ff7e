"""Who is in no plan, or sends what no honest member sends, neither fills a holder of experts nor is counted by it."""

import msgspec
import pytest
from open_gate import OpenGate

from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.limits import QUEUED_TOKENS_MAX
from shoal.protocol.messages import Done, ExpertDone, ExpertTokens
from shoal.protocol.ports import Priority
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.spec import run_id

STAGES = [["a", "b"], ["c", "d"]]
EXPERTS = [[["a", "b"], ["b", "a"]], [["c", "d"], ["d", "c"]]]
STEPS = 80


async def started(make_swarm, tiny_spec):
    """(swarm, a stranger's endpoint) at version 1."""
    tables = msgspec.to_builtins(tiny_spec)
    tables["model"] |= {"dim": 16, "ffn_dim": 24, "num_layers": 2, "context": 16, "num_experts": 2}
    tables["training"] |= {"steps": STEPS, "microbatches_per_step": 4}
    tables["swarm"] |= {"stages": 2}
    swarm = make_swarm(msgspec.convert(tables, type(tiny_spec)), network=uniform(latency_s=0.02, rate_bytes_per_s=1e7))
    for name in "abcd":
        await swarm.add(name, device_flop_per_s=1e8)
    swarm.obey(STAGES, not_started=True, experts=EXPERTS)
    stranger = swarm.world.add_peer("stranger")
    endpoint = Endpoint(
        stranger.identity,
        stranger.transport,
        run=run_id(swarm.spec, swarm.peer("a").peer_id),
        gate=OpenGate(),
        first_sequence=1,
    )
    for other in swarm.world.peers.values():
        await other.transport.introduce(stranger.peer_id, stranger.transport.addresses())
        await stranger.transport.introduce(other.peer_id, other.transport.addresses())
    await swarm.until_step(1)
    return swarm, endpoint


def done(step, *, retried=True):
    return ExpertDone(stage=0, incarnation=1, passage=0, step=step, index=0, experts=((0, 0),), retried=retried)


def kept(swarm, name):
    """Steps of which a holder has gradients."""
    contributions = [membership.work.runtime._contributions for membership in swarm.drivers[name].experts.memberships]
    return {step for of_expert in contributions for step in (*of_expert._sums, *of_expert._apart)}


@pytest.mark.sim
def test_what_is_through_is_counted_for_members_and_for_steps_that_may_run(make_swarm, tiny_spec):
    async def main():
        swarm, stranger = await started(make_swarm, tiny_spec)
        a, b = swarm.peer("a"), swarm.peer("b")
        version = swarm.drivers["a"].experts.memberships[0].version
        with pytest.raises(Refused, match="does not know"):
            await swarm.peer("stranger").spawn(stranger.ask(a.peer_id, done(version), Done))
        with pytest.raises(Refused, match="does not know"):
            await swarm.peer("stranger").spawn(stranger.ask(a.peer_id, done(version + 50), Done))
        with pytest.raises(Refused, match="far behind"):
            await b.spawn(swarm.drivers["b"].services.endpoint.ask(a.peer_id, done(version + 50), Done))
        assert max(kept(swarm, "a"), default=0) < version + 50
        await swarm.until_step(4)
        await swarm.close()
        assert swarm.world.failures == []
        commits = [swarm.commits[group][step] for group in range(6) for step in range(3)]
        assert {(report.microbatches, report.duplicates) for report in commits} == {(4, 0)}

    run(main())


@pytest.mark.sim
@pytest.mark.parametrize("name", ["stranger", "d"])
def test_tokens_of_the_last_step_do_not_fill_a_holder(make_swarm, tiny_spec, name):
    """d is of another stage, and so many of a member's are refused one by one."""

    async def main():
        swarm, stranger = await started(make_swarm, tiny_spec)
        endpoint = stranger if name == "stranger" else swarm.drivers[name].services.endpoint
        server = swarm.drivers["a"].services.experts
        payload = bytes(swarm.drivers["a"].services.arithmetic.tokens.row_bytes)

        async def flood():
            for serial in range(QUEUED_TOKENS_MAX):
                tokens = ExpertTokens(
                    stage=0,
                    incarnation=1,
                    passage=0,
                    serial=serial,
                    step=STEPS,
                    index=0,
                    layer=0,
                    backward=False,
                    counts=((0, 1),),
                )
                await endpoint.send(swarm.peer("a").peer_id, tokens, payload, priority=Priority.BULK)

        await swarm.peer(name).spawn(flood())
        step = max(swarm.commits[0])
        await swarm.until(lambda: max(swarm.commits[0]) > step + 2, timeout_s=60.0)
        assert not [source for source, *_ in server._pending if source == swarm.peer(name).peer_id]
        await swarm.until(lambda: not server._room._taken.total() or max(swarm.commits[0]) > step + 20)
        assert not server._refusals._taken
        await swarm.close()
        assert swarm.world.failures == []

    run(main())
