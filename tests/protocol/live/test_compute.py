import asyncio
import threading
import time

import pytest

from shoal.protocol.errors import LocalError
from shoal.protocol.live.compute import ThreadCompute


def test_the_initializer_runs_once_in_the_thread_of_the_jobs():
    prepared = []

    async def main():
        compute = ThreadCompute(initializer=lambda: prepared.append(threading.current_thread()))
        threads = [(await compute.run("probe", threading.current_thread, flop=0.0)).value for _ in range(3)]
        assert prepared == [threads[0]]
        assert set(threads) == {threads[0]}
        assert threads[0] is not threading.current_thread()
        compute.close()

    asyncio.run(main())


def test_what_is_done_in_the_hosts_memory_waits_for_no_job_and_holds_up_no_loop():
    prepared = []

    async def main():
        compute = ThreadCompute(initializer=lambda: prepared.append(threading.current_thread()))
        may_end = threading.Event()
        job = asyncio.create_task(compute.run("forward", lambda: may_end.wait(30), flop=0.0))
        threads = await asyncio.gather(*(compute.run_on_host(threading.current_thread) for _ in range(3)))
        assert len(set(threads)) == 1
        assert threads[0] is not threading.current_thread()
        assert not job.done()
        with pytest.raises(ZeroDivisionError):
            await compute.run_on_host(lambda: 1 / 0)
        may_end.set()
        assert (await job).value
        assert len(prepared) == 2
        assert threads[0] in prepared
        compute.close()
        with pytest.raises(LocalError):
            await compute.run_on_host(lambda: 1)

    asyncio.run(main())


def test_no_job_runs_on_a_device_that_could_not_be_prepared():
    ran = []

    def fail():
        raise OSError("no such device")

    async def main():
        compute = ThreadCompute(initializer=fail)
        for _ in range(2):
            with pytest.raises(OSError, match="no such device"):
                await compute.run("probe", lambda: ran.append(1), flop=0.0)
        compute.close()

    asyncio.run(main())
    assert ran == []


def test_close_cancels_what_waits_and_the_thread_ends_with_its_job():
    async def main():
        compute = ThreadCompute()
        begun, may_end = threading.Event(), threading.Event()
        threads = []

        def job():
            threads.append(threading.current_thread())
            begun.set()
            may_end.wait(30)
            return "done"

        running = asyncio.create_task(compute.run("step", job, flop=0.0))
        waiting = asyncio.create_task(compute.run("step", lambda: None, flop=0.0))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 30)
        compute.close()
        outcome = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(outcome[0], asyncio.CancelledError)
        may_end.set()
        assert (await running).value == "done"
        threads[0].join(30)
        assert not threads[0].is_alive()

    asyncio.run(main())


def test_a_device_that_is_shared_rests_and_says_that_it_is_slower():
    took_s = []

    def job():
        began_s = time.monotonic()
        time.sleep(0.01)
        took_s.append(time.monotonic() - began_s)

    async def main():
        compute = ThreadCompute(share=0.25)
        began_s = time.monotonic()
        timed = await asyncio.gather(*(compute.run("forward", job, flop=0.0) for _ in range(4)))
        compute.close()
        return began_s, timed

    began_s, timed = asyncio.run(main())
    for job_s, told in zip(took_s, timed, strict=True):
        assert told.ended_s - told.started_s >= 4 * job_s
    for number in range(1, 4):  # nobody may begin before the share has earned what was worked until then
        assert timed[number].started_s - began_s >= 4 * sum(took_s[:number])


def test_of_a_processor_its_own_seconds_count_and_those_of_work_that_is_no_job():
    spent_s = 7.0

    async def main():
        nonlocal spent_s

        def job():
            nonlocal spent_s
            spent_s += 0.02

        compute = ThreadCompute(share=0.5, spent_s=lambda: spent_s)
        began_s = time.monotonic()
        await compute.run("forward", job, flop=0.0)
        spent_s += 0.03  # the network's
        timed = await compute.run("forward", job, flop=0.0)
        compute.close()
        return timed, timed.started_s - began_s

    timed, waited_s = asyncio.run(main())
    assert waited_s >= 0.08, "0.02 s at a share of 0.5, and half of what comes in goes to the network's work"
    assert timed.ended_s - timed.started_s >= 0.04 - 1e-9


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_that_cannot_be_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        ThreadCompute(share=share)
