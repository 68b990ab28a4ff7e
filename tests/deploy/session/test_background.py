import asyncio
import subprocess
import sys
import threading

import pytest

from shoal.deploy.session.background import in_background


def test_it_runs_elsewhere_and_brings_back_what_came_of_it():
    async def main():
        return await in_background(threading.current_thread)

    thread = asyncio.run(main())
    assert thread is not threading.current_thread()
    assert thread.daemon


def test_what_it_raises_is_raised():
    async def main():
        await in_background(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_an_end_does_not_wait_for_it():
    """Else whoever presses Ctrl-C while something compiles waits for the compiler."""
    go, went = threading.Event(), threading.Event()

    def work():
        go.wait(timeout=60.0)
        went.set()

    async def main():
        task = asyncio.create_task(in_background(work))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert not went.is_set()
    go.set()
    assert went.wait(timeout=60.0), "and it ends without complaint, its loop being gone"


@pytest.mark.parametrize(("work_s", "printed"), [(60.0, "said\n"), (0.0, "said\ntaken apart\n")])
def test_a_command_that_ends_while_it_works_does_not_take_the_process_apart_under_it(work_s, printed):
    """A compiler that works in the background made SIGSEGV of an exit code."""
    program = f"""
import asyncio, atexit, sys, time
from shoal.deploy.cli import run
from shoal.deploy.session.background import in_background, is_working

async def begin():
    task = asyncio.create_task(in_background(lambda: time.sleep({work_s})))
    await asyncio.sleep(0)
    while is_working() and not {work_s}:
        await asyncio.sleep(0)
    task.cancel()

def app(prog_name):
    asyncio.run(begin())
    print("said")
    sys.exit(3)

atexit.register(print, "taken apart")
run(app)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, printed, "")
