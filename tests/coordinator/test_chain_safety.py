"""No order of messages, losses and rivals lets two plans of one (term, sequence) go live, or forks the chain.

Proposers and voters are the real ones; which members are on a plan's roll, and in which groups, is drawn. The network
is a bag: each draw delivers, repeats or loses one message, lets somebody campaign or its patience end, has a
coordinator change most of the members, or restarts a peer from its record.
"""

import itertools
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.coordinator.allocate.greedy import GreedyAllocator
from shoal.coordinator.allocate.interface import Layout
from shoal.coordinator.chain import PlanChain
from shoal.coordinator.chain_sync import ChainSync
from shoal.coordinator.cluster_view import ClusterView
from shoal.coordinator.coordination_events import Answered, Ask
from shoal.coordinator.proposer import Ballot, Proposer
from shoal.coordinator.replan_policy import ReplanPolicy
from shoal.protocol.messages import PlanLive, PlanOffer, PlanVote, TermGrant, TermRequest
from shoal.protocol.plan import Member, SignedPlan, Stage, open_link
from shoal.protocol.spec import ModelSpec, RunSpec, SwarmSpec

PEERS = tuple("abcdefg")
OWNER = "a"
SPEC = RunSpec(model=ModelSpec(dim=32, num_layers=2), swarm=SwarmSpec(heartbeat_s=1.0))


def sign_vote(body) -> bytes:
    return b"yes"


def believe(signer, signature, body) -> bool:
    return signature == b"yes"


def layout_of(members) -> Layout:
    stage = Stage(
        first_layer=0, last_layer=2, members=tuple(Member(peer=peer, share=1.0, bandwidth=1.0) for peer in members)
    )
    return Layout(stages=(stage,), spares=(), reason="drawn")


@dataclass
class Bag:
    """Peers, and what is under way between them: (sender, receiver, message, reply to or None)."""

    rng: random.Random
    unsigned: object
    now_s: float = 0.0
    chains: dict[str, PlanChain] = field(default_factory=dict)
    proposers: dict[str, Proposer] = field(default_factory=dict)
    plans: dict[bytes, SignedPlan] = field(default_factory=dict)
    live: list[SignedPlan] = field(default_factory=list)
    under_way: list[tuple] = field(default_factory=list)

    def sign(self, plan) -> SignedPlan:
        signed = self.unsigned(plan)
        self.plans[signed.envelope] = signed
        return signed

    def open(self, link) -> SignedPlan | None:
        """As a driver does; empty bytes are no plan."""
        if not link:
            return None
        envelope, proof = open_link(link, source="")
        return msgspec.structs.replace(self.plans[envelope], proof=proof)

    def proposer(self, peer, chain) -> Proposer:
        policy = ReplanPolicy(ClusterView("run", SPEC), GreedyAllocator())
        policy.view.electorate.roll = self.draw_roll
        return Proposer(
            me=peer,
            owner=OWNER,
            chain=chain,
            policy=policy,
            sign=self.sign,
            sign_vote=sign_vote,
            verify=believe,
            is_fresh=lambda _: False,
            adopt=lambda plan, now_s: self.adopt(peer, plan),
            lost=lambda now_s, outbid: None,
        )

    def draw_roll(self, before, plan, now_s):
        """Any members, in any groups: the weights of their votes differ."""
        at = self.rng.sample(range(len(plan.members)), self.rng.randint(1, len(plan.members)))
        cuts = sorted(self.rng.sample(range(1, len(at)), self.rng.randrange(len(at))))
        return tuple(tuple(at[one:other]) for one, other in itertools.pairwise((0, *cuts, len(at))))

    def begin(self, members) -> None:
        for peer in PEERS:
            self.chains[peer] = PlanChain("run", owner=OWNER, verify=believe, verify_order=believe)
            self.proposers[peer] = self.proposer(peer, self.chains[peer])
        first = self.proposers[OWNER].make(None, 1, layout_of(members), 0.0)
        self.live.append(first)
        for peer in members:
            self.chains[peer].adopt(first)

    # what a driver and a core do between them, without their good sense about when

    def carry_out(self, peer, commands) -> None:
        self.under_way += [(peer, c.peer, c.message, None) for c in commands if isinstance(c, Ask)]

    def adopt(self, peer, plan) -> list:
        """The proposer of `peer` has made `plan` live."""
        self.live.append(plan)
        self.obey(peer, plan, peer)
        return []

    def obey(self, peer, plan, source) -> None:
        """Laggards ask who told them; newcomers take what they are told on trust."""
        adopted = self.chains[peer].adopt(plan)
        if adopted.lacks:
            asks = ChainSync(me=peer, chain=self.chains[peer], heartbeat_s=1.0)
            links = [self.open(link) for link in self.chains[source].links.after(self.digest(peer), 0)]
            found, _ = asks.learn(source, links, self.now_s, may_trust=self.chains[peer].live is None)
            for each, after in found:
                adopted = self.chains[peer].adopt(each, after=after)
        if adopted.new:
            self.proposers[peer].drop()

    def digest(self, peer) -> str:
        live = self.chains[peer].live
        return live.digest if live is not None else ""

    def deliver(self, source, target, message, asked) -> None:
        chain = self.chains[target]
        match message:
            case PlanLive():
                self.obey(target, self.open(message.plan), source)
            case TermRequest():
                base = self.open(message.live)
                self.obey(target, base, source)
                self.under_way.append((target, source, chain.answer_request(source, message, base), message))
            case PlanOffer():
                base = self.open(message.predecessor)
                self.obey(target, base, source)
                reply = chain.answer_offer(source, message.term, self.plans[message.plan], base, sign_vote)
                self.under_way.append((target, source, reply, message))
            case TermGrant() | PlanVote():
                newer, accepted = self.open(message.live), None
                if newer is not None:
                    self.obey(target, newer, source)
                if isinstance(message, TermGrant):
                    accepted = self.plans.get(message.accepted)
                event = Answered(peer=source, asked=asked, reply=message, live=newer, accepted=accepted)
                self.carry_out(target, self.proposers[target].count(event, self.now_s))

    def draw(self) -> None:
        self.now_s += 0.1
        peer, dice = self.rng.choice(PEERS), self.rng.random()
        live, proposer = self.chains[peer].live, self.proposers[peer]
        if self.under_way and dice < 0.86:
            at = self.rng.randrange(len(self.under_way))
            lost, repeated = self.rng.random() < 0.1, self.rng.random() < 0.05
            entry = self.under_way[at] if repeated else self.under_way.pop(at)
            if not lost:
                self.deliver(*entry)
        elif dice < 0.9 and proposer.is_busy:
            self.now_s += self.rng.choice([0.0, 6.0])
            self.carry_out(peer, proposer.press(self.now_s))
        elif dice < 0.93 and live is not None and peer in live.plan.members and not proposer.is_busy:
            self.carry_out(peer, proposer.campaign(live, self.now_s))
        elif dice < 0.99 and live is not None and live.plan.coordinator == peer and not proposer.is_busy:
            members = self.rng.sample(PEERS, self.rng.randint(1, len(PEERS)))
            self.carry_out(peer, proposer.propose(live, layout_of(members), self.now_s))
        elif dice >= 0.99:
            chain = PlanChain("run", owner=OWNER, verify=believe, verify_order=believe)
            record = self.chains[peer].record()
            chain.restore(record, lambda data: self.plans.get(data) or self.open(data))
            self.chains[peer], self.proposers[peer] = chain, self.proposer(peer, chain)

    def check(self) -> None:
        chain = sorted({plan.digest: plan for plan in self.live}.values(), key=lambda plan: plan.plan.order)
        orders = [plan.plan.order for plan in chain]
        assert len(set(orders)) == len(orders), f"two live plans of one order: {orders}"
        for before, after in itertools.pairwise(chain):
            assert after.plan.previous == before.digest, f"{after.plan.order} bypasses {before.plan.order}"


def play(seed, unsigned, num_draws=400) -> Bag:
    rng = random.Random(seed)
    bag = Bag(rng, unsigned)
    bag.begin(rng.sample(PEERS, rng.randint(2, len(PEERS))) if rng.random() < 0.5 else PEERS)
    for _ in range(num_draws):
        bag.draw()
    return bag


def check_many(unsigned) -> None:
    for seed in range(400):
        play(seed, unsigned).check()


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_live_plans_make_one_chain(make_unsigned, seed):
    play(seed, make_unsigned).check()


def test_the_game_is_not_idle(make_unsigned):
    bags = [play(seed, make_unsigned) for seed in range(30)]
    assert sum(len(bag.live) for bag in bags) > 100
    assert max(plan.plan.term for bag in bags for plan in bag.live) > 3


@pytest.mark.parametrize("forgotten", ["what was voted for", "to whom a term is promised"])
def test_the_game_finds_a_chain_that_is_not_safe(make_unsigned, monkeypatch, forgotten):
    if forgotten == "what was voted for":
        monkeypatch.setattr(Ballot, "learn", lambda *_: None)
    else:
        monkeypatch.setattr(PlanChain, "_claim", lambda *_: "")
    with pytest.raises(AssertionError, match=r"two live plans|bypasses"):
        check_many(make_unsigned)
