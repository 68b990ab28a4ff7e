import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.limits import RECORD_BYTES_MAX, RECORD_EXPIRES_S_MAX
from shoal.protocol.sim.directory import GET_LATENCIES, STORE_LATENCIES
from shoal.protocol.sim.loop import run
from shoal.protocol.sim.network import uniform
from shoal.protocol.sim.world import World

NEAR = pytest.approx


def test_a_record_is_seen_by_everyone_once_it_is_published() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        store = asyncio.create_task(a.directory.store("key", "sub", b"value", expires_in_s=60.0))
        assert await b.directory.get("key") == {}
        assert world.now_s() == NEAR(GET_LATENCIES * 0.05)
        assert await store
        assert world.now_s() == NEAR(STORE_LATENCIES * 0.05)
        for peer in (a, b):
            assert await peer.directory.get("key") == {"sub": b"value"}
        assert await a.directory.get("another key") == {}

    run(main())


def test_a_record_lapses_by_the_virtual_clock() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a")
        await a.directory.store("key", "short", b"1", expires_in_s=10.0)
        await a.directory.store("key", "long", b"2", expires_in_s=20.0)
        await asyncio.sleep(9.0 - world.now_s())
        assert await a.directory.get("key") == {"short": b"1", "long": b"2"}
        await asyncio.sleep(9.81 - world.now_s())
        assert await a.directory.get("key") == {"long": b"2"}

    run(main())


def test_what_no_node_accepts_is_refused() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a = world.add_peer("a")
        with pytest.raises(ValueError, match="larger than"):
            await a.directory.store("key", "sub", bytes(RECORD_BYTES_MAX + 1), expires_in_s=10.0)
        for seconds in (0.0, -1.0, float("nan"), RECORD_EXPIRES_S_MAX + 1.0):
            with pytest.raises(ValueError, match="cannot expire"):
                await a.directory.store("key", "sub", b"", expires_in_s=seconds)
        assert await a.directory.store("key", "sub", bytes(RECORD_BYTES_MAX), expires_in_s=10.0)
        assert len((await a.directory.get("key"))["sub"]) == RECORD_BYTES_MAX

    run(main())


def test_a_record_that_expires_while_it_is_published_is_not_stored() -> None:
    async def main() -> None:
        world = World(0, uniform(1.0))
        a = world.add_peer("a")
        assert not await a.directory.store("key", "sub", b"", expires_in_s=5.0)
        assert await a.directory.get("key") == {}

    run(main())


def test_the_record_with_the_later_expiry_stays() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        assert await a.directory.store("key", "sub", b"long", expires_in_s=100.0)
        assert not await b.directory.store("key", "sub", b"short", expires_in_s=50.0)
        assert await b.directory.get("key") == {"sub": b"long"}
        assert await b.directory.store("key", "sub", b"longer", expires_in_s=100.0)
        assert await a.directory.get("key") == {"sub": b"longer"}

    run(main())


def test_two_sides_of_a_cut_keep_what_they_had_and_meet_after_it() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await a.directory.store("key", "from a", b"before", expires_in_s=1000.0)
        world.partition([a], [b])
        await asyncio.sleep(1.0)
        await a.directory.store("key", "from a", b"during", expires_in_s=1000.0)
        await b.directory.store("key", "from b", b"during", expires_in_s=1000.0)
        assert await a.directory.get("key") == {"from a": b"during"}
        assert await b.directory.get("key") == {"from a": b"before", "from b": b"during"}
        world.heal()
        for peer in (a, b):
            assert await peer.directory.get("key") == {"from a": b"during", "from b": b"during"}

    run(main())


def test_a_crashed_peers_records_outlive_it_and_its_last_store_does_not_happen() -> None:
    async def main() -> None:
        world = World(0, uniform(0.05))
        a, b = world.add_peer("a"), world.add_peer("b")
        await a.directory.store("key", "kept", b"", expires_in_s=100.0)
        a.spawn(a.directory.store("key", "lost", b"", expires_in_s=100.0))
        await asyncio.sleep(0.1)
        world.crash(a)
        await asyncio.sleep(1.0)
        assert await b.directory.get("key") == {"kept": b""}

    run(main())


@given(
    stores=st.lists(st.tuples(st.integers(0, 2), st.sampled_from("xyz"), st.integers(1, 40)), max_size=20),
)
def test_what_is_read_is_what_a_plain_model_of_later_expiry_says(stores: list[tuple[int, str, int]]) -> None:
    async def main() -> None:
        world = World(0, uniform(0.0))
        peers = [world.add_peer(name) for name in "abc"]
        model: dict[str, tuple[float, bytes]] = {}
        for index, (who, subkey, expires_in_s) in enumerate(stores):
            now_s, value = world.now_s(), b"%d" % index
            model = {key: held for key, held in model.items() if held[0] > now_s}
            accepted = model.get(subkey, (0.0, b""))[0] <= now_s + expires_in_s
            if accepted:
                model[subkey] = (now_s + expires_in_s, value)
            assert await peers[who].directory.store("key", subkey, value, expires_in_s=expires_in_s) == accepted
            assert await peers[0].directory.get("key") == {key: held[1] for key, held in model.items()}
            await asyncio.sleep(1.5)

    run(main())
