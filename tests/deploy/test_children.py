"""The supervisor leaves nothing behind: real processes, small ones."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from shoal.deploy.base.children import Child, Children

# A child with a grandchild in a session of its own, as a peer has its daemon. It says who that is, then waits.
FAMILY = """
import signal, subprocess, sys
daemon = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True)
def drain(*_):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, {handler})
print(daemon.pid, flush=True)
print("stdin", sys.stdin.readline().strip(), flush=True)
signal.pause()
"""


class Recorder:
    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}
        self.exits: dict[str, int] = {}
        self.changed = asyncio.Event()
        self.children = Children(on_line=self.on_line, on_exit=self.on_exit)

    def on_line(self, child: Child, line: bytes) -> None:
        self.lines.setdefault(child.name, []).append(line.decode())
        self.changed.set()

    def on_exit(self, child: Child, status: int) -> None:
        self.exits[child.name] = status
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def start(self, name: str, log: Path, handler: str = "drain") -> Child:
        argv = [sys.executable, "-c", FAMILY.format(handler=handler)]
        return await self.children.start(name, argv, env=os.environ, log=log)


def recorded(main: Callable[[Recorder], Coroutine[Any, Any, None]]) -> None:
    """Run `main`; whatever becomes of it, no child outlives it."""

    async def run() -> None:
        seen = Recorder()
        try:
            await main(seen)
        finally:
            await seen.children.close()

    asyncio.run(run())


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_lines_exit_status_and_log_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        seen = Recorder()
        code = "import sys; print('a'); print('b'); print('oops', file=sys.stderr); sys.exit(3)"
        await seen.children.start("one", [sys.executable, "-c", code], env=os.environ, log=tmp_path / "log")
        await seen.until(lambda: bool(seen.exits))
        assert seen.lines == {"one": ["a", "b"]}
        assert seen.exits == {"one": 3}
        assert (tmp_path / "log").read_text() == "oops\n"
        await seen.children.close()

    asyncio.run(main())


def test_drained_children_say_good_bye_and_their_daemons_are_swept(tmp_path: Path) -> None:
    async def main() -> None:
        seen = Recorder()
        children = [await seen.start(name, tmp_path / name) for name in "ab"]
        for child in children:
            await seen.children.tell(child, "hello\n")
        await seen.until(lambda: all(len(seen.lines.get(name, [])) == 2 for name in "ab"))
        seen.children.terminate()
        assert await seen.children.wait(timeout_s=20)
        assert seen.exits == {"a": 0, "b": 0}
        assert all(seen.lines[name][1:] == ["stdin hello", "drained"] for name in "ab")
        await seen.children.close()
        assert all(gone(int(seen.lines[name][0])) for name in "ab")

    asyncio.run(main())


def test_a_child_that_ignores_the_signal_is_killed_with_its_daemon(tmp_path: Path) -> None:
    async def main() -> None:
        seen = Recorder()
        child = await seen.start("deaf", tmp_path / "log", handler="signal.SIG_IGN")
        await seen.children.tell(child, "\n")
        await seen.until(lambda: len(seen.lines.get("deaf", [])) == 2)
        seen.children.terminate()
        assert not await seen.children.wait(timeout_s=0.05)
        await seen.children.close()
        assert seen.exits == {"deaf": -signal.SIGKILL}
        assert gone(int(seen.lines["deaf"][0]))

    asyncio.run(main())


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    parent = """
    import asyncio, os, sys
    from pathlib import Path
    from shoal.deploy.base.children import Children
    async def main():
        children = Children(on_line=lambda child, line: None, on_exit=lambda child, status: None)
        argv = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = await children.start("x", argv, env=os.environ, log=Path(sys.argv[1]))
        print(child.process.pid, flush=True)
        await asyncio.sleep(600)
    asyncio.run(main())
    """
    argv = [sys.executable, "-c", textwrap.dedent(parent), str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not gone(pid)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(pid)


# A child whose daemon notices its end, as libp2p's does.
WATCHED = """
import os, subprocess, sys, time
code = "import os, sys, time\\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.02)"
argv = [sys.executable, "-c", code, str(os.getpid())]
print(subprocess.Popen(argv, stdout=subprocess.DEVNULL, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def test_a_kill_meets_the_child_alone_and_tells_what_outlives_it(tmp_path: Path) -> None:
    async def main(seen: Recorder) -> None:
        argv = [sys.executable, "-c", WATCHED]
        good = await seen.children.start("good", argv, env=os.environ, log=tmp_path / "good")
        bad = await seen.start("bad", tmp_path / "bad")
        await seen.until(lambda: len(seen.lines) == 2)
        assert await seen.children.kill(good) == []
        assert await seen.children.kill(bad, patience_s=0.1) == [int(seen.lines["bad"][0])]
        await seen.until(lambda: len(seen.exits) == 2)
        assert seen.exits == {"good": -signal.SIGKILL, "bad": -signal.SIGKILL}
        await seen.children.close()
        assert gone(int(seen.lines["bad"][0]))

    recorded(main)


def test_a_name_may_come_again(tmp_path: Path) -> None:
    async def main(seen: Recorder) -> None:
        first = await seen.start("one", tmp_path / "log")
        await seen.until(lambda: len(seen.lines.get("one", [])) == 1)
        await seen.children.kill(first, patience_s=0.1)
        second = await seen.start("one", tmp_path / "log")
        await seen.until(lambda: len(seen.lines["one"]) == 2)
        assert (first.is_running, second.is_running) == (False, True)
        second.send(signal.SIGTERM)
        first.send(signal.SIGTERM)  # nobody is there to get it
        assert await seen.children.wait(timeout_s=20)

    recorded(main)
