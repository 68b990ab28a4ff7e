import asyncio
import math
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import LocalError
from shoal.protocol.sim.loop import Deadlock, VirtualTimeLoop, owned_context, run


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_sleep_moves_the_clock_by_exactly_that_much() -> None:
    async def main() -> list[float]:
        seen = [now_s()]
        for delay_s in (0.1, 1e6, 0.0, 1e-12):
            await asyncio.sleep(delay_s)
            seen.append(now_s())
        return seen

    assert run(main(), start_s=5.0) == [5.0, 5.1, 5.1 + 1e6, 5.1 + 1e6, 5.1 + 1e6 + 1e-12]


def test_a_timer_fires_although_the_clock_is_too_large_to_resolve_its_delay() -> None:
    async def main() -> float:
        await asyncio.sleep(1e-9)
        return now_s()

    assert run(main(), start_s=1e12) == 1e12


@given(delays_ms=st.lists(st.integers(0, 5), max_size=60))
def test_timers_fire_by_time_then_by_the_order_they_were_set(delays_ms: list[int]) -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for index, delay_ms in enumerate(delays_ms):
            loop.call_at(delay_ms * 1e-3, fired.append, index)
        await asyncio.sleep(1.0)
        return fired

    assert run(main()) == sorted(range(len(delays_ms)), key=lambda index: delays_ms[index])


@given(cancelled=st.sets(st.integers(0, 399)))
def test_cancelled_timers_never_fire_and_all_others_do(cancelled: set[int]) -> None:
    async def main() -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        timers = [loop.call_later(1.0 + index, fired.append, index) for index in range(400)]
        for index in sorted(cancelled):
            timers[index].cancel()
        await asyncio.sleep(1000.0)
        return fired

    assert run(main()) == [index for index in range(400) if index not in cancelled]


def test_queues_timeouts_and_task_groups_mean_what_they_mean_elsewhere() -> None:
    async def main() -> tuple[list[tuple[float, int]], float]:
        queue: asyncio.Queue[int] = asyncio.Queue(maxsize=2)
        got: list[tuple[float, int]] = []

        async def produce() -> None:
            for item in range(5):
                await queue.put(item)

        async def consume() -> None:
            for _ in range(5):
                await asyncio.sleep(1.0)
                got.append((now_s(), await queue.get()))

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await queue.get()
        return got, now_s()

    got, ended_s = run(main())
    assert got == [(1.0, 0), (2.0, 1), (3.0, 2), (4.0, 3), (5.0, 4)]
    assert ended_s == 7.5


def test_a_task_group_cancels_its_tasks_in_the_order_of_their_creation() -> None:
    async def main() -> list[int]:
        cancelled: list[int] = []

        async def wait(index: int) -> None:
            try:
                await asyncio.sleep(10.0)
            finally:
                cancelled.append(index)

        async def fail() -> None:
            await asyncio.sleep(1.0)
            raise ValueError

        async def all_of_them() -> None:
            async with asyncio.TaskGroup() as group:
                padding = [bytearray(index) for index in range(50)]  # so that addresses do not rise with creation
                for index in range(50):
                    padding.pop()
                    group.create_task(wait(index))
                group.create_task(fail())

        with pytest.raises(ExceptionGroup):
            await all_of_them()
        return cancelled

    assert run(main()) == list(range(50))


def test_a_deadlock_names_the_tasks_that_wait_and_where() -> None:
    async def main() -> None:
        async def starve() -> None:
            await asyncio.Queue[int]().get()

        task = asyncio.get_running_loop().create_task(starve(), name="hungry")
        await asyncio.sleep(3.0)
        await task

    with pytest.raises(Deadlock, match=r"at 3 s .*task-0 \(.*main test_loop\.py:\d+\), hungry \(.*starve .*Queue\.get"):
        run(main())


def test_a_timer_at_infinity_is_no_timer() -> None:
    with pytest.raises(Deadlock):
        run(asyncio.sleep(math.inf))


def test_a_deadlock_still_runs_the_cleanup_of_what_waited() -> None:
    cleaned = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            cleaned.append(now_s())

    with pytest.raises(Deadlock):
        run(main())
    assert cleaned == [1.0]


def test_leftovers_are_cancelled_when_main_ends() -> None:
    ended = []

    async def linger() -> None:
        try:
            await asyncio.sleep(100.0)
        finally:
            ended.append(now_s())

    async def main() -> str:
        task = asyncio.get_running_loop().create_task(linger())
        await asyncio.sleep(1.0)
        assert not task.done()
        return "done"

    assert run(main()) == "done"
    assert ended == [1.0]


def test_an_exception_of_main_comes_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(main())


def test_a_call_from_another_thread_is_refused() -> None:
    async def main() -> list[BaseException]:
        loop = asyncio.get_running_loop()
        errors: list[BaseException] = []

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(errors.clear)
            except LocalError as error:
                errors.append(error)

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        return errors

    (error,) = run(main())
    assert "another thread" in str(error)


def test_executors_and_sockets_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(LocalError, match="thread pool"):
            await asyncio.to_thread(print)
        with pytest.raises(LocalError, match="thread pool"):  # it would resolve the name in one
            await asyncio.open_connection("localhost", 1)
        with pytest.raises(LocalError, match="socket"):
            asyncio.get_running_loop().add_reader(0, print)

    run(main())


def test_what_a_frozen_owner_started_waits_until_it_is_thawed() -> None:
    async def main() -> list[tuple[float, str]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        seen: list[tuple[float, str]] = []

        async def tick(name: str) -> None:
            for _ in range(3):
                await asyncio.sleep(1.0)
                seen.append((now_s(), name))

        async def parent() -> None:
            await asyncio.gather(tick("mine"), tick("child"))

        frozen = loop.create_task(parent(), context=owned_context("it"))
        free = loop.create_task(tick("free"))
        await asyncio.sleep(1.5)
        loop.freeze("it")
        await asyncio.sleep(8.5)
        loop.thaw("it")
        await asyncio.gather(frozen, free)
        return seen

    assert run(main()) == [
        *((1.0, name) for name in ("free", "mine", "child")),
        (2.0, "free"),
        (3.0, "free"),
        *((at_s, name) for at_s in (10.0, 11.0) for name in ("mine", "child")),
    ]


@pytest.mark.sim
def test_a_thousand_tasks_end_alike_every_time() -> None:
    async def main() -> tuple[float, int]:
        queue: asyncio.Queue[int] = asyncio.Queue()
        digest = 0

        async def work(index: int) -> None:
            for turn in range(20):
                await asyncio.sleep(0.01 * ((index * 7 + turn) % 13 + 1))
                await queue.put(index)

        async with asyncio.TaskGroup() as group:
            for index in range(1000):
                group.create_task(work(index))
            for _ in range(20_000):
                async with asyncio.timeout(5.0):
                    digest = (digest * 31 + await queue.get()) % (2**61 - 1)
        return now_s(), digest

    assert run(main()) == run(main())
