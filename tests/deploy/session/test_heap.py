import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, sys, threading
from shoal.deploy.session.heap import share_heap
if sys.argv[1] == "one":
    share_heap()
def allocate():
    kept = [ctypes.create_string_buffer(50_000) for _ in range(100)]
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def num_heaps(how: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    argv = [sys.executable, "-c", PROGRAM, how]
    said = subprocess.run(argv, capture_output=True, text=True, check=True, env=environment).stderr
    return said.count("Arena ")


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heaps")
def test_threads_share_one_heap_once_told_so() -> None:
    assert num_heaps("each its own") > 1
    assert num_heaps("one") == 1
