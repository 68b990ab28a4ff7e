"""Who is let in: as many as an invite has seats, and into an open run a few at a time."""

import asyncio

import pytest
from open_gate import everybody

from shoal.coordinator.membership import Admission, network_of
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite, InviteKey
from shoal.protocol.limits import (
    OPEN_NEWCOMERS_MIN,
    OPEN_PER_NETWORK_MAX,
    OPEN_PROBATION_S,
    PROTOCOL_VERSION,
)
from shoal.protocol.membership import Members
from shoal.protocol.messages import Advert

RUN, OWNER = "0123456789abcdef", Identity(bytes(32))


def advert(*addresses: str) -> Advert:
    return Advert(
        name="a",
        device="cpu",
        flop_per_s=1.0,
        memory_bytes=1,
        upload_bytes_per_s=1.0,
        download_bytes_per_s=1.0,
        addresses=addresses,
        has_data=True,
    )


def names(number: int) -> dict[PeerID, Advert | None]:
    return {PeerID(f"member {at}"): advert() for at in range(number)}


def test_seats_and_expiry_are_applied_to_newcomers_alone() -> None:
    now_s = [1000.0]
    members = Members(RUN, OWNER.peer_id, wall_s=lambda: now_s[0])
    key = InviteKey.make(OWNER, run=RUN, seats=1, expires_s=2000)
    invite = Invite(PROTOCOL_VERSION, RUN, OWNER.peer_id, (), key)
    first, second = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))
    for peer in (first, second):
        members.show(peer, invite.certificate_of(peer))
    admission = Admission(members, lambda: 0.0, is_open=False)
    assert admission.why_not(first, advert(), {}) == ""
    assert "all 1 seats" in admission.why_not(second, advert(), {first: None})
    assert admission.why_not(second, advert(), {}) == "", "the seat is free again"
    now_s[0] = 3000.0
    assert "has expired" in admission.why_not(second, advert(), {})
    assert admission.why_not(first, advert(), {first: None}) == ""


def test_an_open_run_takes_a_few_newcomers_at_a_time() -> None:
    now_s = [0.0]
    admission, present = Admission(everybody(RUN), lambda: now_s[0], is_open=True), names(2)
    for number in range(OPEN_NEWCOMERS_MIN):
        newcomer = PeerID(f"new {number}")
        assert admission.why_not(newcomer, advert(), present) == ""
        present[newcomer] = advert()
    assert "in a minute" in admission.why_not(PeerID("late"), advert(), present)
    now_s[0] = OPEN_PROBATION_S + 1
    assert admission.why_not(PeerID("late"), advert(), present) == ""


def test_an_open_run_takes_so_many_of_one_network() -> None:
    now_s = [0.0]
    admission, present = Admission(everybody(RUN), lambda: now_s[0], is_open=True), names(0)
    for number in range(OPEN_PER_NETWORK_MAX):
        now_s[0] += OPEN_PROBATION_S
        newcomer, at = PeerID(f"new {number}"), advert(f"/ip4/84.12.33.{number}/tcp/1")
        assert admission.why_not(newcomer, at, present) == ""
        present[newcomer] = at
    assert "of your network" in admission.why_not(PeerID("x"), advert("/ip4/84.12.33.200/tcp/1"), present)
    assert admission.why_not(PeerID("x"), advert("/ip4/84.12.34.1/tcp/1"), present) == ""


@pytest.mark.parametrize(
    ("addresses", "network"),
    [
        (("/ip4/84.12.33.7/tcp/1",), "84.12.33.0/24"),
        (("/ip4/192.168.0.1/tcp/1", "/ip6/2600:1:2:3::1/tcp/1"), "2600:1:2::/48"),
        (("/ip4/nonsense/tcp/1", "/dns4/example.org/tcp/1"), ""),
        ((), ""),
    ],
)
def test_a_peers_network_is_that_of_its_first_public_address(addresses: tuple[str, ...], network: str) -> None:
    assert network_of(advert(*addresses)) == network


@pytest.mark.sim
def test_who_is_turned_away_is_told_why(run_swarm):
    async def scenario(swarm):
        await swarm.begin(6)
        for peer in swarm.alive():
            peer.coordination._admission.why_not = lambda *_: "all 6 seats are taken"
        await swarm.add("late")
        late = swarm.peers["late"].coordination
        await swarm.until(lambda: late.turned_away == "all 6 seats are taken", within_s=20.0)
        await asyncio.sleep(5.0)
        assert not any(peer.plan.has(swarm.peers["late"].peer_id) for peer in swarm.alive() if peer.name != "late")

    run_swarm(scenario, min_peers=6)
