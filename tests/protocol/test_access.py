"""The one table: who may send what, and under which plans."""

import asyncio

import pytest

from shoal.protocol import messages as m
from shoal.protocol.access import WHO_MAY, Gate, Role, Verdict
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused, RemoteError, Unreachable
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, InviteKey
from shoal.protocol.limits import PLAN_WAIT_S, PLANS_SERVED, PROTOCOL_VERSION, WAITING_FOR_PLAN_MAX
from shoal.protocol.membership import Excluded, Members
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

RUN = "0123456789abcdef"


def gate_of(me: PeerID, plan: Plan | None = None) -> Gate:
    gate = Gate(Members(RUN, PeerID("owner"), is_open=True), me)
    if plan is not None:
        gate.obey(plan)
    return gate


def plan_of(*stages: str, spares: str = "", sequence: int = 1) -> Plan:
    """Each stage's members are letters."""
    return Plan(
        run=RUN,
        term=1,
        sequence=sequence,
        previous="",
        coordinator=PeerID("a"),
        stages=tuple(
            Stage(index, index + 1, tuple(Member(PeerID(peer), 1.0, 1.0) for peer in peers))
            for index, peers in enumerate(stages)
        ),
        spares=tuple(map(PeerID, spares)),
    )


def test_every_message_has_an_entry() -> None:
    kinds = {*m.Message.__args__, *m.FrameMeta.__args__, *m.Record.__args__}
    assert set(WHO_MAY) == kinds


@pytest.mark.parametrize("kind", [kind for kind, role in WHO_MAY.items() if role is Role.NOBODY])
def test_what_is_only_an_answer_is_nobodys_to_send(kind: type) -> None:
    assert gate_of(PeerID("a"), plan_of("ab")).verdict(PeerID("b"), kind) is Verdict.REFUSED


def test_roles_follow_from_the_plan() -> None:
    gate = gate_of(PeerID("c"), plan_of("ab", "cd", "e", "f", spares="g"))

    def may(kind: type) -> str:
        return "".join(peer for peer in "abdefgx" if gate.verdict(PeerID(peer), kind) is Verdict.ALLOWED)

    assert may(m.Progress) == "d"
    assert may(m.Activation) == "abde"
    assert may(m.StateRequest) == "abdefg"
    assert may(m.Heartbeat) == "abdefgx"


def test_who_has_left_the_plan_keeps_its_place_for_some_plans() -> None:
    gate = gate_of(PeerID("a"), plan_of("ab"))
    for sequence in range(2, PLANS_SERVED + 1):
        gate.obey(plan_of("a", sequence=sequence))
    assert gate.verdict(PeerID("b"), m.Progress) is Verdict.ALLOWED
    gate.obey(plan_of("a", sequence=99))
    assert gate.verdict(PeerID("b"), m.Progress) is Verdict.WAIT


@pytest.mark.parametrize("me", ["b", "c"])
def test_who_leaves_a_group_finishes_a_round_with_who_comes_by_the_same_plan(me: str) -> None:
    """No plan has both in the group: "b" leaves stage 0 by the plan that brings "c"."""
    other = "c" if me == "b" else "b"
    gate = gate_of(PeerID(me), plan_of("ab", "dc"))
    assert gate.verdict(PeerID(other), m.ReducePart) is Verdict.WAIT
    gate.obey(plan_of("ac", "db", sequence=2))
    for kind in (m.ReducePart, m.GatherPart, m.Progress, m.Activation):
        assert gate.verdict(PeerID(other), kind) is Verdict.ALLOWED, kind
    for sequence in range(3, PLANS_SERVED + 2):
        gate.obey(plan_of("ac", "db", sequence=sequence))
    assert gate.verdict(PeerID(other), m.ReducePart) is Verdict.WAIT


def test_an_excluded_mate_is_refused_at_once() -> None:
    ana, ben = Identity(bytes(32)), Identity(bytes([1]) * 32)
    plan = Plan(
        run=RUN,
        term=1,
        sequence=1,
        previous="",
        coordinator=ana.peer_id,
        stages=(Stage(0, 1, (Member(ana.peer_id, 1.0, 1.0), Member(ben.peer_id, 1.0, 1.0))),),
    )
    gate = gate_of(ana.peer_id, plan)
    assert gate.verdict(ben.peer_id, m.Progress) is Verdict.ALLOWED
    gate.members.exclude(Excluded({ben.public_key}))
    assert gate.verdict(ben.peer_id, m.Progress) is Verdict.REFUSED


# --- the endpoint enforces it ---


async def endpoints(*names: str, invited: str, expires_s: int = 0) -> dict[str, Endpoint]:
    """The first is the run's owner; those in `invited` have its invite."""
    world = World(0, uniform(0.05))
    peers = [world.add_peer(name) for name in names]
    owner = peers[0]
    key = InviteKey.make(owner.identity, run=RUN, expires_s=expires_s)
    made = {}
    for name, peer in zip(names, peers, strict=True):
        shown = key if name in invited else InviteKey.make(peer.identity, run=RUN)
        members = Invite(PROTOCOL_VERSION, RUN, owner.peer_id, (), shown).members_for(peer.peer_id)
        made[name] = Endpoint(peer.identity, peer.transport, run=RUN, gate=Gate(members, peer.peer_id))
        await peer.transport.introduce(owner.peer_id, owner.transport.addresses())
    return made


async def pong(source: PeerID, message: m.Ping) -> m.Ping:
    return message


def test_a_stranger_is_not_heard_and_a_member_is() -> None:
    async def main() -> None:
        peers = await endpoints("owner", "ana", "mallory", invited="ana")
        owner = peers["owner"].peer_id
        peers["owner"].on(m.Ping, pong)
        for _ in range(2):
            await peers["ana"].ask(owner, m.Ping(), m.Ping)
        with pytest.raises(Unreachable):
            await peers["mallory"].ask(owner, m.Ping(), m.Ping, timeout_s=3.0)
        peers["mallory"].members.certificate = b""
        with pytest.raises(Refused, match="show your certificate"):
            await peers["mallory"].ask(owner, m.Ping(), m.Ping)
        peers["owner"].members.exclude(Excluded({peers["ana"].identity.public_key}))
        with pytest.raises(Refused, match="you are excluded from this run"):
            await peers["ana"].ask(owner, m.Ping(), m.Ping)

    run(main())


def test_whoever_has_forgotten_a_member_asks_for_its_certificate_again() -> None:
    async def main() -> None:
        peers = await endpoints("owner", "ana", invited="ana")
        peers["owner"].on(m.Ping, pong)
        owner = peers["owner"].peer_id
        await peers["ana"].ask(owner, m.Ping(), m.Ping)
        peers["owner"].members._shown.clear()
        await peers["ana"].ask(owner, m.Ping(), m.Ping)

    run(main())


def test_an_expired_invite_reads_nothing_while_a_member_of_the_plan_goes_on() -> None:
    """Chain, status and records: row 7 of what one invite could do."""

    async def main() -> None:
        peers = await endpoints("owner", "ana", "ben", invited="ana ben", expires_s=2_000)
        owner, now_s = peers["owner"], [0.0]
        owner.members._wall_s = lambda: now_s[0]
        both = (Member(owner.peer_id, 1.0, 1.0), Member(peers["ana"].peer_id, 1.0, 1.0))
        owner.obey(
            Plan(run=RUN, term=1, sequence=1, previous="", coordinator=owner.peer_id, stages=(Stage(0, 1, both),))
        )
        for kind in (m.StatusRequest, m.ChainRequest, m.Ping):
            owner.on(kind, done)
        asked = (m.StatusRequest(), m.ChainRequest(after="", override_epoch=0), m.Ping())
        for name in ("ana", "ben"):
            for message in asked:
                await peers[name].ask(owner.peer_id, message, m.Done)
        now_s[0] = 2_001.0
        record = peers["ben"].seal_record(
            m.PlanHead(term=1, sequence=1, digest="", coordinator=owner.peer_id, addresses=())
        )
        for message in asked:
            await peers["ana"].ask(owner.peer_id, message, m.Done)
            with pytest.raises(Refused, match=r"the invite [0-9a-f]{8} has expired: ask the host for a fresh one"):
                await peers["ben"].ask(owner.peer_id, message, m.Done)
        with pytest.raises(RemoteError, match="may not store"):
            owner.open_record(record, source=peers["ben"].peer_id)
        ben = peers["ben"].peer_id
        peers["ben"].members.take_renewed(owner.members.renew(owner.identity, ben), ben)
        await peers["ben"].ask(owner.peer_id, asked[0], m.Done)

    run(main())


async def done(source: PeerID, message: object) -> m.Done:
    return m.Done()


async def claimed(source: PeerID, message: m.Claim) -> m.Grant:
    return m.Grant(items=())


def test_a_message_waits_for_the_plan_that_explains_it_and_not_for_ever() -> None:
    async def main() -> None:
        peers = await endpoints("owner", "ana", invited="ana")
        owner, ana = peers["owner"], peers["ana"]
        both = (Member(owner.peer_id, 1.0, 1.0), Member(ana.peer_id, 1.0, 1.0))
        plan = Plan(run=RUN, term=1, sequence=1, previous="", coordinator=owner.peer_id, stages=(Stage(0, 1, both),))
        owner.on(m.Claim, claimed)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(Refused, match="a Claim is not yours to send here"):
            await ana.ask(owner.peer_id, m.Claim(count=1), m.Grant)
        assert PLAN_WAIT_S <= loop.time() - began_s < PLAN_WAIT_S + 1.0
        asking = asyncio.create_task(ana.ask(owner.peer_id, m.Claim(count=1), m.Grant))
        await asyncio.sleep(PLAN_WAIT_S / 2)
        assert not asking.done()
        owner.obey(plan)
        await asking
        assert not owner._waiting

    run(main())


def test_only_so_many_messages_of_one_wait_for_a_plan() -> None:
    async def main() -> None:
        peers = await endpoints("owner", "ana", invited="ana")
        owner, ana = peers["owner"], peers["ana"]
        owner.on(m.Claim, claimed)
        asked = [
            asyncio.create_task(ana.ask(owner.peer_id, m.Claim(count=1), m.Grant)) for _ in range(WAITING_FOR_PLAN_MAX)
        ]
        await asyncio.sleep(PLAN_WAIT_S / 2)
        assert owner._waiting.total() == WAITING_FOR_PLAN_MAX // 16
        await asyncio.gather(*asked, return_exceptions=True)
        assert not owner._waiting

    run(main())
