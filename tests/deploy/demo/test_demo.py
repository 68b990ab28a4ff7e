"""A demo that cannot begin or is killed; `test_demo_equality.py` has one that trains to its end, and
`../dashboard/test_live_peers.py` a volunteer that joins one."""

from typing import Any

import pytest

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def test_a_demo_without_text_says_why(world: Any) -> None:
    demo = world.shoal("demo", "--data", world.folder / "none", "--peers", 2, "--stages", 2)
    assert demo.wait(100) == 2, demo.output
    assert demo.errors == f"shoal: there is no file or folder {world.folder}/none to train on\n"
    assert not world.ours()


def test_a_killed_demo_takes_its_peers_along(world: Any) -> None:
    demo = world.shoal("demo", "--spec", world.spec(100_000), "--peers", 2, "--stages", 2)
    demo.line("step ")
    demo.process.kill()
    demo.process.wait()
    world.until(lambda: not world.ours(), timeout_s=30)
