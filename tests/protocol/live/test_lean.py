"""What hivemind imports and we never use stays out of memory."""

import subprocess
import sys


def _run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_hivemind_does_not_load_the_optimizers_of_scipy() -> None:
    program = (
        "import sys, shoal.protocol.live.transport, hivemind.averaging.load_balancing as used\n"
        "print('scipy.optimize._optimize' in sys.modules, used.scipy.optimize.linprog.__name__)"
    )
    # Not loaded after the import; the second word shows that whoever does use it still can.
    assert _run(program) == "False linprog"
