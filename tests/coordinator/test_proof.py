"""A live plan proves itself, and what does not is obeyed by nobody: not a plan of a member's own, nor one that no peer
could follow. The attacks were all obeyed when `PlanChain.adopt` asked for a higher order only."""

import asyncio
import itertools

import msgspec
import pytest
from open_gate import OpenGate

from shoal.coordinator.chain import ChainLog, PlanChain, proof_flaw
from shoal.coordinator.chain_sync import ChainSync
from shoal.coordinator.proposer import Ballot
from shoal.coordinator.store import PlanStore
from shoal.protocol import limits
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.identity import Identity
from shoal.protocol.messages import ChainLinks, ChainRequest, Done, PlanLive
from shoal.protocol.plan import (
    Mandate,
    Member,
    Plan,
    PlanProof,
    SignedPlan,
    Stage,
    is_quorum,
    sign_mandate,
    sign_plan,
    vote_body,
)
from shoal.protocol.seals import SEALS
from shoal.protocol.statement import sign_statement

ABC = [["a"], ["b"], ["c"]]


@pytest.fixture
def first(make_plan):
    return make_plan(ABC, coordinator="a")


@pytest.fixture
def second(make_plan, first):
    return make_plan(ABC, coordinator="a", order=(1, 2), base=first)


@pytest.fixture
def chain(make_chain, first):
    chain = make_chain()
    chain.adopt(first)
    return chain


def with_votes(plan: SignedPlan, *votes: tuple[int, bytes], ballot: int = 1) -> SignedPlan:
    return msgspec.structs.replace(plan, proof=PlanProof(ballot, votes))


# --- votes ---


@pytest.mark.parametrize(
    ("votes", "ballot", "flaw"),
    [
        ([], 1, "0 of 3 have voted"),
        ([(0, b"yes")], 1, "1 of 3 have voted"),
        ([(0, b"yes"), (0, b"yes"), (0, b"yes")], 1, "1 of 3 have voted"),
        ([(0, b"yes"), (-1, b"yes"), (3, b"yes")], 1, "1 of 3 have voted"),
        ([(0, b"yes"), (1, b"no")], 1, "the vote of b"),
        ([(0, b"yes"), (1, b"yes"), (2, b"no")], 1, "the vote of c"),
        ([(index % 3, b"yes") for index in range(4)], 1, "no majority"),
        ([(0, b"yes"), (1, b"yes")], 0, "no honest coordinator"),
        ([(0, b"yes"), (1, b"yes")], 2**63, "no honest coordinator"),
        ([(0, b"yes"), (1, b"yes")], 1, ""),
        ([(0, b"yes"), (1, b"yes")], 7, ""),
    ],
)
def test_a_plan_is_obeyed_with_a_majority_of_its_predecessors_votes_only(chain, first, second, votes, ballot, flaw):
    offered = with_votes(second, *votes, ballot=ballot)
    adopted = chain.adopt(offered)
    assert (adopted.new, flaw in adopted.reason, adopted.lacks) == (not flaw, True, False)
    assert chain.live is (offered if not flaw else first)
    assert chain.num_forks == 0


def test_a_plan_without_any_votes_is_nobodys(chain, first, second):
    assert "carries no votes" in chain.adopt(msgspec.structs.replace(second, proof=None)).reason
    assert chain.live is first


def test_votes_are_for_one_plan_of_one_run_in_one_ballot():
    """With real keys: a signature that serves another purpose is no vote."""
    a, b, c = (Identity(bytes([number] * 32)) for number in range(3))

    def verify(signer, signature, body):
        return SEALS.statement_holds(signer, signature, "vote", run="run", body=body)

    def voted(*, run="run", ballot=2, digest="d2", topic="vote"):
        return [
            (at, sign_statement(peer, topic, run=run, body=vote_body(ballot, digest))) for at, peer in enumerate((a, b))
        ]

    def flaw(votes, make=PlanProof):
        base = SignedPlan(plan_named(a, b, c), b"", "d1")
        plan = SignedPlan(
            msgspec.structs.replace(base.plan, sequence=2, previous="d1"), b"", "d2", make(2, tuple(votes))
        )
        return proof_flaw(plan, base, owner=a.peer_id, verify=verify)

    assert flaw(voted()) == ""
    for other in ({"run": "another"}, {"ballot": 3}, {"digest": "d3"}, {"topic": "state"}):
        assert "forged" in flaw(voted(**other))
    assert "forged" in flaw([(1, voted()[0][1]), (2, voted()[1][1])]), "whose place another takes"


def plan_named(*peers: Identity):
    members = tuple(Member(peer.peer_id, 1.0, 1.0) for peer in peers)
    return Plan(
        run="run", term=2, sequence=1, previous="", coordinator=peers[0].peer_id, stages=(Stage(0, 2, members),)
    )


def test_only_the_owner_makes_a_first_plan(make_chain, make_plan):
    chain = make_chain()
    for plan in (make_plan(ABC, coordinator="b"), make_plan(ABC, coordinator="a", order=(1, 2))):
        assert "only the owner makes a first plan" in chain.adopt(plan).reason
    assert chain.live is None
    assert chain.adopt(make_plan(ABC, coordinator="a")).new


@pytest.mark.parametrize(
    ("says", "flaw"),
    [
        ({"order": (2 + limits.TERM_JUMP_MAX, 2)}, "too far"),
        ({"order": (1, 2 + limits.SEQUENCE_JUMP_MAX)}, "too far"),
        ({"era": 1 + limits.ERA_JUMP_MAX}, "era"),
        ({"restore_version": 9}, "has begun elsewhere"),
        ({"override_epoch": 1}, "without a mandate"),
        ({"order": (1, 2), "coordinator": "b"}, "another coordinator"),
    ],
)
def test_steps_are_bounded_even_with_everybodys_votes(make_plan, chain, first, says, flaw):
    usual = {"coordinator": "a", "order": (1, 2)}
    plan = make_plan(ABC, base=first, **(usual | says))
    assert flaw in chain.adopt(plan).reason
    assert flaw in chain.vote(plan.plan.coordinator, plan.plan.term, plan, first)
    assert chain.live is first


def test_a_candidate_never_finishes_what_nobody_can_have_voted_for(make_plan, chain, first):
    asking = Ballot(base=first, term=2, owner="a", expires_at_s=9.0)
    asking.learn(1, make_plan(ABC, coordinator="a", order=(1, 2), base=first, era=1 << 40))
    asking.learn(2**60, make_plan(ABC, coordinator="a", order=(1, 2), base=first))
    assert asking.found is None


# --- electors ---


def test_of_many_members_a_jury_decides_that_hangs_on_the_plan_before(make_plan):
    many = [[f"peer{number:04d}" for number in range(limits.ELECTED_FROM_PEERS + 1)]]
    plan = make_plan(many, coordinator="peer0000").plan
    assert len(plan.electors) == limits.ELECTORS == len(set(plan.electors) & set(plan.members))
    for change in ({"term": 9}, {"sequence": 9}, {"coordinator": "peer0001"}, {"seed": 5}, {"reason": "again"}):
        assert msgspec.structs.replace(plan, **change).electors == plan.electors
    other = msgspec.structs.replace(plan, previous="another")
    assert len(set(other.electors) & set(plan.electors)) < limits.ELECTORS
    few = make_plan([many[0][:-1]], coordinator="peer0000").plan
    assert few.electors == few.members


def test_votes_of_a_thousand_fit_beside_their_plan(make_plan):
    groups = [[f"12D3KooW{stage:02d}{number:042d}" for number in range(250)] for stage in range(4)]
    base = make_plan(groups, coordinator=groups[0][0])
    votes = tuple((at, bytes(64)) for at in range(len(base.plan.electors)))
    plan = with_votes(make_plan(groups, coordinator=groups[0][0], order=(1, 2), base=base), *votes)
    assert len(plan.link) - len(plan.envelope) < 10 * 1024
    assert len(plan.link) + len(base.link) < limits.CONTROL_BYTES_MAX
    majority = set(base.plan.electors[: limits.ELECTORS // 2 + 1])
    assert is_quorum(majority, base.plan, groups[0][0])


# --- mandates ---


def test_a_mandate_wins_over_every_plan_that_a_peer_may_hold(make_plan, make_chain, chain, first):
    far = make_plan(
        ABC, coordinator="a", order=(1 + limits.TERM_JUMP_MAX, 2 + limits.SEQUENCE_JUMP_MAX - 1), base=first
    )
    assert chain.adopt(far).new
    mandated = make_plan([["b"], ["c"]], coordinator="b", order=(5, 3), mandate=b"m", override_epoch=1, previous="lost")
    assert chain.adopt(mandated).new
    assert (chain.granted_term, chain.granted_to) == (5, "b"), "what was promised before binds nobody"
    assert not chain.adopt(make_plan(ABC, coordinator="a", order=(9, 9), base=far)).new
    again = make_plan([["b"]], coordinator="b", order=(5, 4), mandate=b"m", override_epoch=1, previous="lost")
    assert "has been used" in chain.adopt(again).reason, "one mandate is for one plan"
    assert chain.adopt(make_plan([["b"], ["c"]], coordinator="b", order=(5, 4), base=mandated, override_epoch=1)).new


# --- laggards and newcomers ---


def grow(make_plan, first, num):
    plans = [first]
    for number in range(num):
        plans.append(make_plan(ABC, coordinator="a", order=(1, 2 + number), base=plans[-1]))
    return plans


def obeying(make_chain, plans):
    chain = make_chain()
    for plan in plans:
        assert chain.adopt(plan).new
    return chain


def learn(asker: PlanChain, teller: PlanChain, plans, *, may_trust):
    by_link = {plan.link: plan for plan in plans}
    digest = asker.live.digest if asker.live else ""
    links = [by_link[link] for link in teller.links.after(digest, asker.height[0])]
    asking = ChainSync(me="me", chain=asker, heartbeat_s=1.0)
    found, more = asking.learn("teller", links, 0.0, may_trust=may_trust)
    for plan, after in found:
        asker.adopt(plan, after=after)
    return more


def test_a_laggard_comes_by_every_link_that_it_lacks(make_plan, make_chain, first):
    plans = grow(make_plan, first, 20)
    teller, laggard = obeying(make_chain, plans), obeying(make_chain, plans[:3])
    assert laggard.adopt(plans[-1]).lacks
    learn(laggard, teller, plans, may_trust=False)
    assert laggard.live is plans[-1]


def test_a_newcomer_takes_the_plan_before_on_trust_and_no_other(make_plan, make_chain, first):
    plans = grow(make_plan, first, 20)
    teller, newcomer = obeying(make_chain, plans), make_chain()
    learn(newcomer, teller, plans, may_trust=True)
    assert newcomer.live is plans[-1]
    forged = [*plans[:-1], msgspec.structs.replace(plans[-1], proof=PlanProof(1, ()))]
    teller.links = ChainLog()
    for plan in forged:
        teller.links.add(plan)
    other = make_chain()
    learn(other, teller, forged, may_trust=True)
    assert other.live is None


def test_who_hears_its_coordinator_takes_nothing_on_trust(make_plan, make_chain, first):
    plans = grow(make_plan, first, 20)
    teller, laggard = obeying(make_chain, plans), obeying(make_chain, plans[:3])
    teller.links = ChainLog()
    for plan in plans[10:]:
        teller.links.add(plan)
    learn(laggard, teller, plans, may_trust=False)
    assert laggard.live is plans[2]
    learn(laggard, teller, plans, may_trust=True)
    assert laggard.live is plans[-1]


def test_a_new_override_epoch_is_believed_with_its_mandate_only(make_plan, make_chain, first):
    plans = grow(make_plan, first, 3)
    mandated = make_plan(ABC, coordinator="b", order=(9, 9), mandate=b"m", override_epoch=1, previous=plans[-1].digest)
    after = make_plan(ABC, coordinator="b", order=(9, 10), base=mandated, override_epoch=1)
    last = make_plan(ABC, coordinator="b", order=(9, 11), base=after, override_epoch=1)
    teller = obeying(make_chain, [*plans, mandated, after, last])
    laggard = obeying(make_chain, plans[:1])
    asking = ChainSync(me="me", chain=laggard, heartbeat_s=1.0)
    assert asking.learn("teller", [after, last], 0.0, may_trust=True)[0] == []
    learn(laggard, teller, [*plans, mandated, after, last], may_trust=True)
    assert laggard.live is last


def test_kept_links_are_bounded_and_never_fewer_than_two(make_plan, make_chain, first, monkeypatch):
    plans = grow(make_plan, first, 40)
    monkeypatch.setattr("shoal.coordinator.chain.LINKS_KEPT_BYTES", 5 * len(plans[-1].link))
    chain = obeying(make_chain, plans)
    assert len(chain.links.after(plans[0].digest, 0)) == 2
    assert len(chain.links.after(plans[-4].digest, 0)) == 3
    monkeypatch.setattr("shoal.coordinator.chain.LINKS_KEPT_BYTES", 1)
    chain = obeying(make_chain, plans)
    assert chain.links.after("", 0) == (plans[-2].link, plans[-1].link)


def test_a_peer_is_asked_once_at_a_time_and_never_many(make_chain, first):
    asking = ChainSync(me="me", chain=obeying(make_chain, [first]), heartbeat_s=1.0)
    assert len(asking.ask("b", 0.0)) == 1
    assert asking.ask("b", 0.5) == [] == asking.ask("me", 0.5)
    assert sum(len(asking.ask(f"p{number}", 0.5)) for number in range(50)) == 7
    assert len(asking.ask("b", 1.6)) == 1


# --- a swarm, by its real drivers ---


async def attacker(swarm):
    port = swarm.world.add_peer("stranger")
    endpoint = Endpoint(port.identity, port.transport, run=swarm.peers["p0"].plan.run, gate=OpenGate())
    for peer in swarm.alive():
        await port.transport.introduce(peer.peer_id, peer.port.transport.addresses())
    return port, endpoint


async def tell_everybody(swarm, port, endpoint, plan):
    reasons = []
    for peer in swarm.alive():
        try:
            await port.spawn(endpoint.ask(peer.peer_id, PlanLive(plan=plan.link), Done))
        except Refused as refused:
            reasons.append(refused.reason)
    return reasons


@pytest.mark.sim
@pytest.mark.parametrize("votes", ["none", "its own", "forged"])
def test_nobody_obeys_a_strangers_plan(run_swarm, votes):
    """Row 1 of the issue: three calls were enough, and the era began anew."""

    async def scenario(swarm):
        await swarm.begin(6)
        port, endpoint = await attacker(swarm)
        live = swarm.peers["p1"].coordination.plan
        plan = msgspec.structs.replace(
            live.plan, term=2, sequence=2, previous=live.digest, coordinator=port.peer_id, era=1, not_started=True
        )
        signed = sign_plan(port.identity, plan)
        body = vote_body(2, signed.digest)
        own = sign_statement(port.identity, "vote", run=live.plan.run, body=body)
        signature = {"none": b"", "its own": own, "forged": bytes(64)}[votes]
        cast = tuple((at, signature) for at in range(6)) if votes != "none" else ()
        signed = msgspec.structs.replace(signed, proof=PlanProof(2, cast))
        await tell_everybody(swarm, port, endpoint, signed)
        await asyncio.sleep(10.0)
        assert {(peer.order, peer.plan.era) for peer in swarm.alive()} == {((1, 1), 0)}
        assert all(peer.coordination.num_alarms == 0 for peer in swarm.alive())

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
@pytest.mark.parametrize("says", [{"term": 2**64 - 1}, {"sequence": 2**64 - 1}, {"era": 2**63}, {"seed": 2**64 - 1}])
def test_a_plan_that_nobody_could_follow_stops_nobody(run_swarm, says):
    """Row 2: every peer ended in an OverflowError."""

    async def scenario(swarm):
        await swarm.begin(6)
        port, endpoint = await attacker(swarm)
        live = swarm.peers["p1"].coordination.plan
        plan = msgspec.structs.replace(live.plan, previous=live.digest, coordinator=port.peer_id)
        plan = msgspec.structs.replace(plan, **({"term": 2, "sequence": 2} | says))
        reasons = await tell_everybody(swarm, port, endpoint, sign_plan(port.identity, plan))
        assert len(reasons) == 6
        assert all("no run comes to" in reason for reason in reasons)
        await swarm.add("new")
        await swarm.until(lambda: swarm.agreed() and swarm.peers["new"].order > (1, 1), within_s=10.0)

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_a_peer_whose_disk_was_poisoned_by_such_a_plan_comes_back(run_swarm):
    """Row 2: the plan was on disk, and so the peer ended again after each restart."""

    async def scenario(swarm):
        await swarm.begin(6)
        victim, live = swarm.peers["p5"], swarm.peers["p1"].coordination.plan
        plan = msgspec.structs.replace(live.plan, term=2**64 - 1, sequence=9, coordinator=victim.peer_id)
        record = victim.coordination.core.chain.record()
        poisoned = PlanStore()
        poisoned.save(
            msgspec.structs.replace(
                record, live=sign_plan(victim.port.identity, plan).envelope, granted_term=2**64 - 1, before=b"junk"
            )
        )
        swarm.world.crash(victim.port)
        back = await swarm.add("p5", store=poisoned)
        await swarm.until(lambda: swarm.agreed() and back.peer_id in swarm.coordinator.plan.members, within_s=20.0)
        assert back.coordination.core.chain.granted_term < 10

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_a_plan_from_before_plans_had_votes_is_taken_up_from_our_own_disk(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        live = swarm.peers["p5"].coordination.plan
        old = PlanStore()
        old.save(msgspec.structs.replace(swarm.peers["p5"].coordination.core.chain.record(), live=live.envelope))
        swarm.world.crash(swarm.peers["p5"].port)
        back = await swarm.add("p5", store=old)
        assert back.coordination.plan.digest == live.digest

    run_swarm(scenario, min_peers=6)


def test_a_plan_with_other_stages_in_the_same_era_is_refused(make_plan, chain, first):
    """Row 5: the peer that obeyed it ended in an IndexError, even if everybody had voted for it."""
    fewer = make_plan([["a", "b"], ["c"]], coordinator="a", order=(1, 2), base=first)
    assert chain.adopt(fewer).reason == "era 0 has other stages"
    later = make_plan([["a", "b"], ["c"]], coordinator="a", order=(1, 2), base=first, era=1)
    assert chain.adopt(later).new


@pytest.mark.sim
def test_who_was_away_for_many_plans_follows_by_its_links(run_swarm):
    async def scenario(swarm):
        await swarm.begin(7)
        away = swarm.peers["p6"]
        cut = swarm.world.partition([away.port], [peer.port for peer in swarm.alive() if peer is not away])
        for number in range(6):
            await swarm.add(f"new{number}")
            await asyncio.sleep(3.0)
        swarm.world.heal(cut)
        took_s = await swarm.until(
            lambda: swarm.agreed() and away.peer_id in swarm.coordinator.plan.members, within_s=30
        )
        assert took_s < 10.0
        orders = [plan.plan.order for plan in away.plans]
        assert len(orders) > 5, "each link was proven against the one before"
        links = ChainRequest(after=away.plans[0].digest, override_epoch=0)
        asked = await away.port.spawn(away.coordination._endpoint.ask(swarm.peers["p1"].peer_id, links, ChainLinks))
        assert len(asked.links) >= 5

    run_swarm(scenario, min_peers=7)


@pytest.mark.sim
def test_the_owners_mandate_is_followed_by_a_swarm_that_has_a_majority(run_swarm):
    """Whatever peers hold: the owner may take the run back from a majority."""

    async def scenario(swarm):
        await swarm.begin(6)
        owner = swarm.peers["p0"]
        base = owner.coordination.plan
        leave = Mandate(override_epoch=1, term=1001, coordinator=owner.peer_id, previous="whatever")
        mandate = sign_mandate(owner.port.identity, leave, run=base.plan.run)
        plan = msgspec.structs.replace(
            base.plan,
            override_epoch=1,
            term=1001,
            sequence=2,
            previous="whatever",
            mandate=mandate,
            era=1,
            not_started=True,
        )
        port, endpoint = await attacker(swarm)
        await tell_everybody(swarm, port, endpoint, sign_plan(owner.port.identity, plan))
        await swarm.until(lambda: all(peer.plan.override_epoch == 1 for peer in swarm.alive()), within_s=3.0)
        await swarm.add("new")
        await swarm.until(lambda: swarm.agreed() and swarm.peers["new"].order > (1001, 2), within_s=10.0)

    run_swarm(scenario, min_peers=6)


@pytest.mark.sim
def test_a_member_alone_ends_no_run_and_moves_no_step(run_swarm):
    """Row 3 of the issue: heartbeats that name the last version for every stage in turn were believed at once."""

    async def scenario(swarm):
        await swarm.begin(6)
        liar = swarm.peers["p5"]
        honest, stages = liar.heartbeat, itertools.cycle(range(3))
        steps = swarm.spec.training.steps

        def lie():
            everybody = tuple((peer.peer_id, bytes(64)) for peer in swarm.alive())
            return msgspec.structs.replace(honest(), stage=next(stages), version=steps, synced=True, ends=everybody)

        liar.coordination._heartbeat = lie
        await asyncio.sleep(20.0)
        assert not any(peer.coordination.core.done for peer in swarm.alive())
        status = swarm.coordinator.coordination.status()
        assert (status.step, status.loss) == (0, None)

    run_swarm(scenario, min_peers=6)
