"""What we never use stays out of memory."""

import subprocess
import sys


def _run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_a_peer_loads_nothing_that_a_dense_run_does_not_use() -> None:
    program = (
        "import sys, shoal.deploy.session.session\n"
        "unused = ('scipy', 'numba', 'sympy', 'hivemind.moe', 'hivemind.averaging', 'hivemind.optim')\n"
        "print([name for name in unused if name in sys.modules], 'hivemind.p2p' in sys.modules)"
    )
    assert _run(program) == "[] True"


def test_a_command_that_only_asks_a_run_something_does_not_load_torch() -> None:
    program = (
        "import sys, shoal.deploy.cli, shoal.deploy.visitor.status\n"
        "import shoal.protocol.live.directory, shoal.deploy.visitor.recover\n"
        "print('torch' in sys.modules, 'hivemind.dht.node' in sys.modules)"
    )
    assert _run(program) == "False True"


def test_a_name_that_was_kept_out_says_so() -> None:
    program = (
        "import shoal.protocol.live\n"
        "try:\n    from hivemind.utils import MPFuture\n"
        "except ImportError:\n    import hivemind.utils\n    print(hasattr(hivemind.utils, 'MPFuture'))\n"
        "from hivemind.utils import get_logger, timed_storage\n"
        "print(get_logger.__module__, timed_storage.__name__)"
    )
    assert _run(program) == "False\nhivemind.utils.logging hivemind.utils.timed_storage"


def test_an_assignment_of_experts_still_finds_scipy() -> None:
    program = (
        "import sys, shoal.coordinator.experts.replan as r\n"
        "print('scipy' in sys.modules, r.fewest_fetches([[1], [0]], ((0,), (1,)), kinds=[0, 0]))"
    )
    assert _run(program) == "False ((1,), (0,))"


def test_hivemind_that_was_loaded_before_stays_as_it_is() -> None:
    program = "import hivemind, shoal.protocol.live; print(hivemind.DHT.__name__)"
    assert _run(program) == "DHT"
