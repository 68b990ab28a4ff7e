"""In virtual time, with a peer that only notes what it is told."""

import asyncio
import os
import signal

from shoal.deploy.control.control_socket import ControlServer, ask
from shoal.deploy.manners.core import Seen
from shoal.deploy.manners.keeper import LOOK_S, Keeper
from shoal.deploy.manners.limits import Limits
from shoal.protocol.sim.loop import run


class Peer:
    def __init__(self):
        self.is_paused = False
        self.pauses = 0

    def pause(self):
        self.is_paused = True
        self.pauses += 1

    def resume(self):
        self.is_paused = False


def test_hours_pause_and_resume_a_peer_and_a_broken_look_changes_nothing():
    said, peer = [], Peer()
    minutes = iter([21 * 60, 22 * 60, None, 23 * 60, 7 * 60])

    def look():
        minute = next(minutes)
        if minute is None:
            raise OSError("no such file")
        return Seen(minute=minute)

    async def inline(work):
        return work()

    async def main():
        keeper = Keeper(Limits(hours="22:00-07:00"), peer, say=said.append, look=look, run_blocking=inline)
        keeper.start()
        states = []
        for _ in range(5):
            await asyncio.sleep(LOOK_S / 2)
            states.append(peer.is_paused)
            await asyncio.sleep(LOOK_S / 2)
        await keeper.close()
        return states

    assert run(main()) == [True, False, False, False, True]
    paused = "paused: outside the hours 22:00-07:00, until 22:00"
    assert said == [paused, "computing again", paused]


def test_limits_that_change_hold_at_once_as_far_as_they_can():
    said, peer, uploads = [], Peer(), []
    settings = {"hours": "22:00-07:00", "upload_mbit_s": 8.0, "memory_gb": 3.0}

    async def inline(work):
        return work()

    async def main():
        keeper = Keeper(
            Limits(compute_share=0.5),
            peer,
            say=said.append,
            look=lambda: Seen(minute=12 * 60),
            run_blocking=inline,
            reread=lambda: Limits(**settings),
            apply_upload=uploads.append,
        )
        keeper.start()
        answer = await keeper.change()
        await asyncio.sleep(LOOK_S / 2)
        assert peer.is_paused
        settings.clear()
        await keeper.change()
        assert not peer.is_paused
        await keeper.change()
        await keeper.close()
        return answer["limits"]

    now = run(main())
    assert (now["hours"], now["upload_mbit_s"]) == ("22:00-07:00", 8.0)
    assert (now["memory_gb"], now["compute_share"]) == (0.0, 0.5), "from the next start on"
    assert uploads == [1e6, float("inf")]
    assert said == [
        "limits from now on: 50% of the device's time, upload at most 8 Mbit/s, only 22:00-07:00",
        "paused: outside the hours 22:00-07:00, until 22:00",
        "limits from now on: 50% of the device's time",
        "computing again",
    ]


def test_without_hours_or_idleness_nobody_looks():
    async def main():
        keeper = Keeper(Limits(), Peer(), say=print, look=lambda: 1 / 0)
        keeper.start()
        await asyncio.sleep(60.0)
        await keeper.close()

    run(main())


def test_pause_resume_and_ctrl_z_by_their_own_ways(tmp_path):
    said, peer = [], Peer()

    async def main():
        keeper = Keeper(Limits(compute_share=0.5), peer, say=said.append, look=lambda: Seen(minute=0))
        control = ControlServer(tmp_path)
        keeper.install(control)
        await control.start()
        try:
            answer = await asyncio.to_thread(ask, tmp_path, "pause")
            assert answer["paused"]
            assert peer.is_paused
            report = keeper.report()
            assert (report.paused, report.caps) == (True, ("50% of the device's time",))
            os.kill(os.getpid(), signal.SIGTSTP)
            await until(lambda: len(keeper.reasons) == 2)
            assert not (await asyncio.to_thread(ask, tmp_path, "resume"))["paused"]
            os.kill(os.getpid(), signal.SIGTSTP)
            await until(lambda: peer.is_paused)
            os.kill(os.getpid(), signal.SIGTSTP)
            await until(lambda: not peer.is_paused)
            os.kill(os.getpid(), signal.SIGTSTP)
            await until(lambda: peer.is_paused)
            os.kill(os.getpid(), signal.SIGCONT)
            await until(lambda: not peer.is_paused)
        finally:
            await control.close()
            await keeper.close()

    asyncio.run(main())
    assert peer.pauses == 3
    assert said[-1] == "computing again"


def test_a_pause_survives_a_restart_until_it_is_resumed(tmp_path):
    kept = tmp_path / "paused"

    def life(act):
        """What a process says, and whether its peer is paused at its start and at its end."""
        said, peer = [], Peer()

        async def main():
            keeper = Keeper(Limits(), peer, say=said.append, look=lambda: Seen(minute=0), kept=kept)
            keeper.start()
            before = peer.is_paused
            if act is not None:
                await act(keeper)
            await keeper.close()
            return before

        return run(main()), peer.is_paused, said

    paused = "paused: you asked for it (`shoal resume` ends it)"
    assert life(Keeper.pause) == (False, True, [paused])
    assert life(None) == (True, True, [paused])
    assert life(Keeper.resume) == (True, False, [paused, "computing again"])
    assert life(None) == (False, False, [])


def test_a_pause_that_the_disk_does_not_take_is_still_a_pause(tmp_path):
    said, peer = [], Peer()
    kept = tmp_path / "not-a-folder" / "paused"
    kept.parent.write_text("")

    async def main():
        keeper = Keeper(Limits(), peer, say=said.append, look=lambda: Seen(minute=0), kept=kept)
        await keeper.pause()

    run(main())
    assert peer.is_paused
    assert "a restart will forget the pause" in said[-1]


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - a signal wakes nobody
            await asyncio.sleep(0.01)
