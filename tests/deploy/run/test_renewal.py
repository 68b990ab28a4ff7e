"""A member that was in a plan gets a certificate that lasts, and shows it after a restart."""

from pathlib import Path

import pytest

from shoal.deploy.node.renewal import FILE_NAME, Renewal, take_kept
from shoal.protocol.access import Gate
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.errors import Refused
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, InviteKey
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.live.disk import LiveDisk
from shoal.protocol.plan import Member, Plan, Stage
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

RUN, WEEK_S = "0123456789abcdef", 7 * 24 * 3600
NOW_S = 1_800_000_000


def test_a_member_in_a_plan_asks_and_keeps_what_it_gets_over_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        world, now_s, disk = World(0, uniform(0.05)), [NOW_S], LiveDisk(tmp_path)
        owner, ana = world.add_peer("owner"), world.add_peer("ana")
        invite = Invite(
            PROTOCOL_VERSION, RUN, owner.peer_id, (), InviteKey.make(owner.identity, run=RUN, expires_s=NOW_S + WEEK_S)
        )
        endpoints = []
        for peer in (owner, ana):
            members = invite.members_for(peer.peer_id)
            members._wall_s = lambda: float(now_s[0])
            endpoints.append(Endpoint(peer.identity, peer.transport, run=RUN, gate=Gate(members, peer.peer_id)))
        host, member = endpoints
        await ana.transport.introduce(owner.peer_id, owner.transport.addresses())
        Renewal(host, None)
        renewal = Renewal(member, disk)
        with pytest.raises(Refused, match="not yours to send"):
            await renewal.ask()
        both = tuple(Member(peer.peer_id, 1.0, 1.0) for peer in (owner, ana))
        host.obey(
            Plan(run=RUN, term=1, sequence=1, previous="", coordinator=owner.peer_id, stages=(Stage(0, 1, both),))
        )
        first = member.members.certificate
        await renewal.ask()
        assert member.members.certificate != first

        restarted = invite.members_for(ana.peer_id)
        take_kept(restarted, disk, ana.peer_id)
        assert restarted.certificate == member.members.certificate
        late, now_s[0] = invite.members_for(owner.peer_id), NOW_S + WEEK_S + 1
        late._wall_s, late.planned = (lambda: float(now_s[0])), set()
        late.show(ana.peer_id, first)
        assert not late.access_level(ana.peer_id)
        late.show(ana.peer_id, restarted.certificate)
        assert late.access_level(ana.peer_id)

    run(main())


def test_what_is_kept_of_another_invite_or_damaged_is_left_alone(tmp_path: Path) -> None:
    owner, ana = Identity(bytes(32)), Identity(bytes([1]) * 32).peer_id
    invite = Invite(PROTOCOL_VERSION, RUN, owner.peer_id, (), InviteKey.make(owner, run=RUN, expires_s=NOW_S))
    members = invite.members_for(ana)
    own = members.certificate
    other = Invite(PROTOCOL_VERSION, RUN, owner.peer_id, (), InviteKey.make(owner, run=RUN, expires_s=NOW_S))
    (tmp_path / RUN).mkdir()
    for kept in (b"", b"rubbish", other.certificate_of(ana)):
        (tmp_path / RUN / FILE_NAME).write_bytes(kept)
        take_kept(members, LiveDisk(tmp_path), ana)
        assert members.certificate == own
