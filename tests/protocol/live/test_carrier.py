"""A carrier between sockets: whom it carries for, how much, and what it says to the others."""

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec
import pytest
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID as HivemindPeerID
from hypothesis import given
from hypothesis import strategies as st
from open_gate import everybody

from carried_wires import connected
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.limits import CARRIED_STREAMS_MAX, CARRIED_STREAMS_OF_ONE_MAX
from shoal.protocol.live.carriage import CarriageAnswer, Carried, Carry, check_member, encode, read
from shoal.protocol.live.carrier import Carrier
from shoal.protocol.live.throttle import CARRIED, Throttle
from shoal.protocol.membership import Excluded, Members, certify, delegate
from shoal.protocol.ports import Priority
from shoal.protocol.token_bucket import RateLimits

A, B, C, OWNER = (Identity(bytes([number]) * 32) for number in (1, 2, 3, 4))
INVITE = Identity(bytes([5]) * 32)
RATE = 1e9
AT, ELSEWHERE = "/ip4/20.0.1.10/tcp/4001", "/ip4/20.0.2.10/tcp/5001"
CIRCUIT = f"/ip4/20.0.3.10/tcp/4001/p2p/{OWNER.peer_id}/p2p-circuit"


def certificate(member: Identity, *, may_train: bool = True) -> bytes:
    delegation = delegate(OWNER, INVITE.public_key, run="run", may_train=may_train)
    return certify(INVITE, delegation, member.peer_id, run="run")


class World:
    """A carrier, and both ends' sockets."""

    def __init__(self, members=None, *, throttle=None, rate=RATE):
        self.connected = {A.peer_id: [AT, "/ip4/20.0.1.10/udp/4001/quic-v1"], B.peer_id: [CIRCUIT, ELSEWHERE]}
        self.arrived, self.tasks = [], []
        self.carrier = Carrier(
            members or everybody("run"),
            throttle or Throttle(),
            relay_bytes_per_s=rate,
            connected=self._list,
            open_stream=self._open,
            find_connection=self._find,
        )
        self.found = []
        self.answer = CarriageAnswer("", b"")

    async def _list(self):
        return self.connected

    async def _find(self, peer):
        self.found.append(peer)

    async def _open(self, peer):
        here, there = await connected()
        self.arrived.append((peer, there, await self._greet(peer, here, there)))
        return here

    async def _greet(self, peer, here, there):
        task = asyncio.create_task(self._say(peer, there))
        self.tasks.append(task)
        return task

    async def _say(self, peer, there):
        said = await read(there[0], Carried, peer)
        there[1].write(encode(self.answer))
        return said

    async def ask(self, to=B, *, source=A, shown=b"", purpose="frames"):
        """Returns: the opener's stream, and what the carrier answered."""
        here, there = await connected()
        info = SimpleNamespace(peer_id=HivemindPeerID.from_base58(source.peer_id))
        self.tasks.append(asyncio.create_task(self.carrier.carry(info, *there)))
        here[1].write(encode(Carry(to.peer_id, purpose, shown)))
        return here, await read(here[0], CarriageAnswer, C.peer_id)

    async def end(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


def run(main, **options):
    async def around():
        world = World(**{name: make() if callable(make) else make for name, make in options.items()})
        try:
            await main(world)
        finally:
            await world.end()

    asyncio.run(around())


def test_bytes_pass_both_ways_and_the_end_passes_too(eventually):
    async def main(world):
        here, answer = await world.ask()
        assert answer.refusal == ""
        (peer, there, said) = world.arrived[0]
        assert peer == B.peer_id
        assert (await said).source == A.peer_id
        assert (await said).seen_at == (AT,)
        assert answer.seen_at == (ELSEWHERE,)
        here[1].write(b"to b")
        assert await there[0].readexactly(4) == b"to b"
        there[1].write(b"to a" * 100_000)
        assert await here[0].readexactly(400_000) == b"to a" * 100_000
        assert world.carrier.carried_bytes == 400_004
        assert len(world.carrier._carried) == 1
        assert set(world.found) == {A.peer_id, B.peer_id}
        here[1].write(b"last words")
        here[1].close()
        assert await there[0].read() == b"last words"
        await eventually(lambda: len(world.carrier._carried) == 0)

    run(main)


@pytest.mark.parametrize(
    ("to", "complaint"),
    [(C, "it has no connection with the other end"), (A, "both ends are the same peer")],
)
def test_what_it_cannot_do_is_refused_with_a_reason(to, complaint, eventually):
    async def main(world):
        here, answer = await world.ask(to)
        assert answer.refusal == complaint
        assert await here[0].read() == b""
        await eventually(lambda: len(world.carrier._carried) == 0)

    run(main)


def test_it_carries_for_members_alone_and_to_members_alone(caplog):
    members = Members("run", OWNER.peer_id, certificate=certificate(C))

    async def main(world):
        with pytest.raises(EOFError):
            await world.ask()  # a stranger hears nothing
        assert "is no member of this run" in caplog.text
        with pytest.raises(EOFError):
            await world.ask(shown=certificate(A, may_train=False))
        with pytest.raises(EOFError):
            await world.ask(shown=certificate(B))
        assert not world.arrived
        _, answer = await world.ask(shown=certificate(A))
        assert answer.refusal == "the other end does not take it"
        world.answer = CarriageAnswer("", certificate(B))
        _, answer = await world.ask(shown=certificate(A))
        assert answer.refusal == ""
        check_member(Members("run", OWNER.peer_id), C.peer_id, answer.certificate)

    run(main, members=members)


def test_whoever_is_put_out_of_the_run_is_carried_no_more():
    members = everybody("run")

    async def main(world):
        here, _ = await world.ask()
        members.exclude(Excluded({B.public_key}))
        world.carrier.cut(members.is_excluded)
        assert await here[0].read() == b""
        _, answer = await world.ask()
        assert answer.refusal == "the other end is excluded from the run"

    run(main, members=members)


def test_streams_of_one_member_are_bounded_at_either_end():
    others = [Identity(bytes([100 + number]) * 32) for number in range(CARRIED_STREAMS_OF_ONE_MAX + 1)]

    async def main(world):
        world.connected |= {other.peer_id: [] for other in others}
        kept = [await world.ask(to) for to in others[:-1]]
        assert {answer.refusal for _, answer in kept} == {""}
        _, answer = await world.ask(others[-1])
        assert answer.refusal.startswith(f"it carries {CARRIED_STREAMS_OF_ONE_MAX} of your streams")
        _, answer = await world.ask(A, source=others[-1])
        assert answer.refusal.startswith(f"it carries {CARRIED_STREAMS_OF_ONE_MAX} of the other end's streams")
        _, answer = await world.ask(others[0], source=B)
        assert answer.refusal == ""

    run(main)


def test_streams_are_bounded_in_all(monkeypatch, eventually):
    monkeypatch.setattr("shoal.protocol.live.carrier.CARRIED_STREAMS_MAX", 3)
    assert CARRIED_STREAMS_MAX > 3

    async def main(world):
        kept = [await world.ask() for _ in range(3)]
        _, answer = await world.ask()
        assert answer.refusal == "it carries 3 streams, its limit"
        kept[0][0][1].close()
        await eventually(lambda: len(world.carrier._carried) == 2)
        assert (await world.ask())[1].refusal == ""

    run(main)


def test_what_is_no_request_is_not_answered(caplog):
    async def main(world):
        here, there = await connected()
        info = SimpleNamespace(peer_id=HivemindPeerID.from_base58(A.peer_id))
        carrying = asyncio.create_task(world.carrier.carry(info, *there))
        here[1].write(b"\xff\xff" + bytes(100))
        assert await here[0].read() == b""
        await carrying
        assert "65535 bytes about a carried stream" in caplog.text

    run(main)


def test_an_end_that_answers_nonsense_is_no_way(caplog):
    async def main(world):
        async def say(peer, there):
            there[1].write(b"\x00\x01\xc1")

        world._say = say
        _, answer = await world.ask()
        assert answer.refusal == "the other end does not take it"

    run(main)


async def put_through(world, *, purpose="frames"):
    here, answer = await world.ask(purpose=purpose)
    assert not answer.refusal
    return here, world.arrived[-1][1]


async def transfer(ends, nbytes):
    """Send so much, and take it at the other end. Returns: the seconds."""
    here, there = ends
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    here[1].write(bytes(nbytes))
    await there[0].readexactly(nbytes)
    return loop.time() - began_s


def test_it_carries_no_faster_than_its_limit_in_all():
    async def main(world):
        both = [await put_through(world) for _ in range(2)]
        took = await asyncio.gather(*(transfer(ends, 50_000) for ends in both))
        # 100 kB at 100 kB/s and what the network adds, less a burst of 0.1 s and two slices that may go ahead
        assert max(took) > 0.7

    run(main, rate=100_000.0)


def test_calls_do_not_wait_for_frames_that_wait(eventually):
    async def main(world):
        frames = asyncio.create_task(transfer(await put_through(world), 400_000))
        await eventually(lambda: world.carrier.carried_bytes > 50_000)
        here, _ = await world.ask(source=B, to=A, purpose="calls")
        there = world.arrived[-1][1]
        here[1].write(b"heartbeat")
        await there[0].readexactly(9)
        assert not frames.done()
        frames.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await frames

    run(main, rate=100_000.0)


def test_what_is_carried_counts_towards_the_volunteers_upload():
    async def main(world):
        assert await transfer(await put_through(world), 100_000) > 0.7
        await asyncio.sleep(0.2)  # what was owed is paid
        await transfer(await put_through(world, purpose="calls"), 30_000)
        assert world.carrier._throttle.line.limiter.wait_s() > 0.0

    run(main, throttle=lambda: Throttle(RateLimits(upload_bytes_per_s=100_000.0)))


def test_own_gradients_go_before_what_is_carried_and_copies_of_state_after():
    async def main(world):
        line, passed = world.carrier._throttle.line, []

        async def own(priority):
            await line.admit(1_000, priority, B.peer_id)
            passed.append(priority)

        line.limiter.charge(20_000)  # somebody has just sent: all of these have to wait
        waiting = [asyncio.create_task(own(priority)) for priority in (Priority.STATE, CARRIED, Priority.GRADIENT)]
        await asyncio.gather(*waiting)
        assert passed == [Priority.GRADIENT, CARRIED, Priority.STATE]

    run(main, throttle=lambda: Throttle(RateLimits(upload_bytes_per_s=100_000.0)))


def test_a_slow_end_holds_the_fast_one(eventually):
    async def main(world):
        here, _ = await world.ask()
        writing = asyncio.create_task(self_paced(here[1], 64))
        before = -1
        while world.carrier.carried_bytes != before:  # until nothing moves any more
            before = world.carrier.carried_bytes
            await asyncio.sleep(0.2)
        assert not writing.done()
        assert world.carrier.carried_bytes < 4 * 2**20
        there = world.arrived[0][1]
        await there[0].readexactly(64 * 2**20)
        await writing

    async def self_paced(writer, mib):
        for _ in range(mib):
            writer.write(bytes(2**20))
            await writer.drain()

    run(main)


SAID = [
    Carry(B.peer_id, "frames", b""),
    Carried(A.peer_id, "calls", b"", (AT,)),
    CarriageAnswer("no", b"", (AT, ELSEWHERE)),
]


@pytest.mark.parametrize("said", SAID, ids=lambda said: type(said).__name__)
@given(at=st.integers(0, 200), to=st.integers(0, 255), cut=st.integers(0, 200))
def test_what_is_nearly_said_is_a_message_or_the_fault_of_who_said_it(said, at, to, cut):
    data = bytearray(encode(said))
    data[at % len(data)] = to
    del data[cut:]

    async def main():
        reader = asyncio.StreamReader()
        reader.feed_data(bytes(data))
        reader.feed_eof()
        with contextlib.suppress(RemoteError, EOFError):
            assert isinstance(await read(reader, type(said), A.peer_id), type(said))

    asyncio.run(main())


@pytest.mark.parametrize("name", ["", "nobody", A.peer_id[:-1], "\n" * 52, "Ä" * 52])
def test_who_names_nobody_says_nothing_readable(name):
    async def main(said):
        reader = asyncio.StreamReader()
        reader.feed_data(said)
        with pytest.raises(RemoteError, match="sent an unreadable message") as found:
            await read(reader, Carried, A.peer_id)
        assert str(found.value).isprintable()

    body = msgspec.msgpack.encode((name, "frames", b"", ()))
    asyncio.run(main(len(body).to_bytes(2, "big") + body))


def test_a_peer_that_is_no_member_is_named():
    with pytest.raises(RemoteError, match="is no member of this run"):
        check_member(Members("run", OWNER.peer_id), A.peer_id, b"")
