"""What may stand in a run's directory: all that its peers post, and nothing that a stranger makes up."""

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hivemind.utils.serializer import MSGPackSerializer

from shoal.coordinator.discovery import Discovery, peers_key, plan_key
from shoal.deploy.run.directory_rules import record_rules
from shoal.deploy.session.network import open_network
from shoal.deploy.state.spec_record import SpecKeeper, fetch_spec, record_key, seal_spec
from shoal.protocol.access import Gate
from shoal.protocol.endpoint import Endpoint
from shoal.protocol.envelope import seal
from shoal.protocol.identity import Identity
from shoal.protocol.invite import Invite, InviteKey
from shoal.protocol.limits import PROTOCOL_VERSION, RECORD_BYTES_MAX
from shoal.protocol.live import directory as directory_module
from shoal.protocol.live.loop import run as run_live
from shoal.protocol.messages import Advert, AdvertRecord, SpecRecord
from shoal.protocol.plan import Member, Plan, Stage, sign_plan
from shoal.protocol.sim.loop import run
from shoal.protocol.spec import RunSpec, TrainingSpec, continued_spec, encode_spec, run_id
from shoal.protocol.token_bucket import RateLimits

OWNER, PEER, STRANGER = (Identity(bytes([number]) * 32) for number in range(3))
SPEC = RunSpec(name="mine", seed=7)
RUN = run_id(SPEC, OWNER.peer_id)
KEY = InviteKey.make(OWNER, run=RUN)


def gate_of(identity: Identity, *, invited: bool = True) -> Gate:
    key = KEY if invited else InviteKey.make(STRANGER, run=RUN)
    return Gate(Invite(PROTOCOL_VERSION, RUN, OWNER.peer_id, (), key).members_for(identity.peer_id), identity.peer_id)


RULES = record_rules(gate_of(OWNER))
ADDRESS = f"/ip4/192.168.100.101/tcp/31337/p2p/{PEER.peer_id}"
ADVERT = Advert(
    name="a" * 40,
    device="NVIDIA GeForce RTX 4090",
    flop_per_s=8.1e13,
    memory_bytes=24 << 30,
    upload_bytes_per_s=1e6,
    download_bytes_per_s=1e7,
    addresses=(ADDRESS,) * 8,
    has_data=True,
)


class Shelf:
    """A directory that notes what it is given and says whether it has taken it."""

    def __init__(self, *, takes: bool = True) -> None:
        self.stored: list[tuple[str, str, bytes]] = []
        self._takes = takes

    async def store(self, key: str, subkey: str, value: bytes, *, expires_in_s: float) -> bool:
        self.stored.append((key, subkey, value))
        return self._takes

    async def get(self, key: str) -> Mapping[str, bytes]:
        return {subkey: value for at, subkey, value in self.stored if at == key}


def transport() -> Any:
    return SimpleNamespace(serve=lambda **_: None, addresses=lambda: ADVERT.addresses)


def endpoint_of(identity: Identity, *, invited: bool = True) -> Endpoint:
    gate = gate_of(identity, invited=invited)
    return Endpoint(identity, transport(), run=RUN, gate=gate, first_sequence=int(1e6 * time.time()))


async def until_cancelled(shelf: Shelf, seconds: float) -> None:
    keeper = SpecKeeper(shelf, endpoint_of(PEER), (SPEC, seal_spec(OWNER, SPEC)), OWNER.peer_id)
    keeping = asyncio.create_task(keeper.keep())
    await asyncio.sleep(seconds)
    keeping.cancel()


def test_all_that_a_peer_posts_is_accepted() -> None:
    shelf = Shelf()
    plan = Plan(
        run=RUN,
        term=3,
        sequence=7,
        previous="",
        coordinator=PEER.peer_id,
        stages=(Stage(0, 6, (Member(PEER.peer_id, 1.0, 1.0),)),),
        reason="drawn",
    )

    async def main() -> None:
        clock = cast(Any, SimpleNamespace(now_s=asyncio.get_running_loop().time))
        notices = Discovery(endpoint_of(PEER), shelf, clock)
        await notices.advertise(ADVERT)
        await notices.publish(sign_plan(PEER, plan))
        await until_cancelled(shelf, 1.0)

    run(main())
    assert {key for key, _, _ in shelf.stored} == set(RULES)
    for key, subkey, value in shelf.stored:
        assert RULES[key].accept(subkey, value)
        assert not RULES[key].accept(subkey, value[:-1] + bytes([value[-1] ^ 1]))
        for other in RULES.keys() - {key}:
            assert not RULES[other].accept(subkey, value)


def test_who_has_no_invite_posts_nothing() -> None:
    uninvited = endpoint_of(STRANGER, invited=False)
    record = AdvertRecord(advert=ADVERT)
    assert not RULES[peers_key(RUN)].accept(STRANGER.peer_id, uninvited.seal_record(record))
    body = msgspec.msgpack.encode(record)
    for certificate in (b"", b"rubbish", endpoint_of(PEER).members.certificate):
        sealed = seal(STRANGER, "record", run=RUN, term=0, sequence=0, body=body, certificate=certificate)
        assert not RULES[peers_key(RUN)].accept(STRANGER.peer_id, sealed), certificate


def test_nobody_speaks_for_another() -> None:
    advert = endpoint_of(PEER).seal_record(AdvertRecord(advert=ADVERT))
    assert RULES[peers_key(RUN)].accept(PEER.peer_id, advert)
    for subkey in (STRANGER.peer_id, "", "12D3KooW", "\0"):
        assert not RULES[peers_key(RUN)].accept(subkey, advert)


def test_the_spec_is_the_owners_under_any_name() -> None:
    accept = RULES[record_key(RUN)].accept
    record = seal_spec(OWNER, SPEC)
    for subkey in (OWNER.peer_id, STRANGER.peer_id, "made up"):
        assert accept(subkey, record)
    assert not accept(STRANGER.peer_id, seal_spec(STRANGER, SPEC))
    assert not accept(OWNER.peer_id, seal_spec(OWNER, RunSpec(name="mine", seed=8)))
    later = continued_spec(SPEC, RunSpec(training=TrainingSpec(steps=900)), at=400)
    assert accept(STRANGER.peer_id, seal_spec(OWNER, later)), "another revision is the same run"
    assert not accept(STRANGER.peer_id, seal_spec(STRANGER, later))


@pytest.mark.parametrize(
    "spec", [b"", b"rubbish", b"\x91" * 30_000, encode_spec(SPEC), encode_spec(SPEC)[:-1], encode_spec(SPEC) + b"\xc0"]
)
def test_a_spec_that_a_stranger_signs_for_the_run_is_refused(spec: bytes) -> None:
    body = msgspec.msgpack.encode(SpecRecord(spec=spec))
    record = seal(STRANGER, "record", run=RUN, term=0, sequence=0, body=body)
    assert not RULES[record_key(RUN)].accept(STRANGER.peer_id, record)


def test_an_advert_of_another_run_or_of_many_pages_is_refused() -> None:
    accept = RULES[peers_key(RUN)].accept
    sealed = partial(seal, PEER, term=0, sequence=0, certificate=endpoint_of(PEER).members.certificate)
    body = msgspec.msgpack.encode(AdvertRecord(advert=ADVERT))
    assert accept(PEER.peer_id, sealed("record", run=RUN, body=body))
    assert not accept(PEER.peer_id, sealed("record", run="f" * 16, body=body))
    assert not accept(PEER.peer_id, sealed("call", run=RUN, body=body))
    long = msgspec.structs.replace(ADVERT, device="x" * 5000)
    body = msgspec.msgpack.encode(AdvertRecord(advert=long))
    assert not accept(PEER.peer_id, sealed("record", run=RUN, body=body))


def test_the_adverts_of_a_thousand_peers_fit() -> None:
    record = MSGPackSerializer.dumps(endpoint_of(PEER).seal_record(AdvertRecord(advert=ADVERT)))
    assert 1000 * (len(record) + len(PEER.peer_id) + 24) < RULES[peers_key(RUN)].bytes_max
    assert sum(rule.bytes_max for rule in RULES.values()) < 3 << 20


def test_a_directory_without_room_for_a_copy_is_asked_ever_more_seldom() -> None:
    full, roomy = Shelf(takes=False), Shelf()
    run(until_cancelled(full, 3600.0))
    run(until_cancelled(roomy, 3600.0))
    assert len(full.stored) < 25
    assert len(roomy.stored) == 12


@pytest.mark.process
def test_a_run_can_be_joined_though_strangers_flood_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger is a node of the run that asks for nothing of what it stores."""
    monkeypatch.setattr(directory_module, "_JOIN_AGAIN_S", 0.1)

    def network(name: str, identity: Identity, invited: tuple[str, ...] = ()) -> Any:
        return open_network(
            identity,
            gate_of(identity).members,
            folder=tmp_path / name,
            listen=("/ip4/127.0.0.1/tcp/0",),
            announce=(),
            rates=RateLimits(),
            invited=invited,
        )

    async def main() -> None:
        async with network("host", OWNER) as host:
            found = (SPEC, seal_spec(OWNER, SPEC))
            keeper = SpecKeeper(host.directory, endpoint_of(OWNER), found, OWNER.peer_id)
            keeping = asyncio.create_task(keeper.keep())
            addresses = host.transport.addresses()
            async with network("stranger", STRANGER, addresses) as stranger:
                node = stranger.directory._node
                node.protocol.record_validator = None
                for key in (record_key(RUN), peers_key(RUN), plan_key(RUN), "anything"):
                    for start in range(0, 100, 50):
                        await node.store_many(
                            [f"{RUN}/{key}"] * 50,
                            [bytes(RECORD_BYTES_MAX)] * 50,
                            time.time() + 3600.0,
                            subkeys=[f"{start + number}" for number in range(50)],
                            exclude_self=True,
                        )
            assert len(host.directory._node.protocol.storage.data) == 1
            async with network("late", PEER, addresses) as late:
                invite = Invite(PROTOCOL_VERSION, RUN, OWNER.peer_id, addresses)
                spec, _ = await fetch_spec(late.directory, invite, timeout_s=10.0)
                assert spec == SPEC
            keeping.cancel()

    for name in ("host", "stranger", "late"):
        (tmp_path / name).mkdir()
    run_live(main())
