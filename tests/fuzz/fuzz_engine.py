"""Runs one target many times: with Atheris, which follows coverage, where it is installed, else with bytes at random.

    python tests/fuzz/fuzz_engine.py calls --runs 100000 --seed 3 --folder build/fuzz

Exits with 1 after a finding, which stands in `corpus/` from then on, as the first line of the target's file that the
test suite plays. A finding is an error that the target's door does not name, a second of computing, or memory that
grows beyond `MEMORY_BYTES_MAX`.
"""

import argparse
import logging
import random
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

HANG_S = 1.0
"""Of this process's computing, not of the clock: the machine may have other work."""
MEMORY_BYTES_MAX = 2 << 30
INPUT_BYTES_MAX = 600
"""Decisions for the largest messages; what is missing is the first option everywhere."""
CORPUS = Path(__file__).parent / "corpus"
SWARMS = {"swarm_members": (False, False), "swarm_strangers": (True, False), "swarm_experts": (False, True)}
"""Name -> (strangers, experts); these are played by seed and not by bytes."""
_MUTATE_ONE_IN = 2


class Hang(AssertionError):
    """One execution takes longer than `HANG_S`."""


@contextmanager
def hang_watch() -> Iterator[Callable[[], None]]:
    """Raises `Hang` in the midst of what has computed for `HANG_S` since the last call of what this yields."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Hang(f"computes for more than {HANG_S} s")

    before = signal.signal(signal.SIGPROF, late)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_PROF, HANG_S)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def kept(name: str) -> list[bytes]:
    """The corpus of a target: one input a line in hexadecimal, and after a # what it has found."""
    path = CORPUS / f"{name}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [bytes.fromhex(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]


def keep(name: str, data: bytes, why: str) -> None:
    """Put a finding first."""
    path = CORPUS / f"{name}.txt"
    before = path.read_text() if path.exists() else ""
    CORPUS.mkdir(exist_ok=True)
    path.write_text(f"{data.hex()}  # {' '.join(why.split())[:100]}\n{before}")


def play(target: Callable[[bytes], None], *, runs: int, seed: int, corpus: list[bytes]) -> None:
    """Random bytes, every other time a kept input with some of its bytes changed.

    Raises: what the target raises, Hang; a note on the error has the input in hexadecimal.
    """
    rng = random.Random(seed)
    target(b"")  # what is made once is no part of an execution
    with hang_watch() as begin:
        for _ in range(runs):
            data = rng.randbytes(rng.randrange(INPUT_BYTES_MAX))
            if corpus and rng.randrange(_MUTATE_ONE_IN) == 0:
                data = _mutated(rng, rng.choice(corpus))
            begin()
            try:
                target(data)
            except Exception as error:
                error.add_note(data.hex())
                raise


def _mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data[:INPUT_BYTES_MAX])
    for _ in range(rng.randrange(8)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed) + rng.randbytes(rng.randrange(16))


def _play_with_atheris(name: str, runs: int, seed: int, folder: Path) -> None:
    """Never returns: libFuzzer ends the process, with 0 if nothing was found; `folder` keeps what reached new code."""
    import atheris

    with atheris.instrument_imports(include=["shoal"]):
        import fuzz_targets

    target = fuzz_targets.TARGETS[name]
    target(b"")
    inputs = folder / name
    inputs.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(kept(name)):
        (inputs / f"kept-{number}").write_bytes(data)
    watch = hang_watch()
    begin = watch.__enter__()

    def once(data: bytes) -> None:
        begin()
        try:
            target(data)
        except Exception as error:
            keep(name, data, repr(error))
            raise

    options = [f"-runs={runs}", f"-seed={seed}", f"-max_len={INPUT_BYTES_MAX}", "-verbosity=0", "-print_final_stats=1"]
    options += [f"-rss_limit_mb={MEMORY_BYTES_MAX >> 20}", f"-artifact_prefix={folder}/", str(inputs)]
    atheris.Setup([sys.argv[0], *options], once)
    atheris.Fuzz()


def _has_atheris() -> bool:
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="where Atheris keeps what it has found")
    parser.add_argument("--plain", action="store_true", help="at random, even where Atheris is installed")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    begun_s = time.monotonic()
    if arguments.target in SWARMS:
        import fuzz_swarm

        fuzz_swarm.quiet()
        strangers, experts = SWARMS[arguments.target]
        session = fuzz_swarm.Session(arguments.seed, strangers=strangers, experts=experts)
        told: Any = session.play(arguments.runs)
    elif _has_atheris() and not arguments.plain:
        _play_with_atheris(arguments.target, arguments.runs, arguments.seed, arguments.folder)
    else:
        import fuzz_targets

        followed = arguments.folder / arguments.target
        corpus = kept(arguments.target) + [path.read_bytes() for path in sorted(followed.glob("*"))]
        try:
            play(fuzz_targets.TARGETS[arguments.target], runs=arguments.runs, seed=arguments.seed, corpus=corpus)
        except Exception as error:
            keep(arguments.target, bytes.fromhex(error.__notes__[0]), repr(error))
            raise
        told = f"{arguments.runs} executions"
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(f"{arguments.target}: {told} in {time.monotonic() - begun_s:.0f} s, {peak_bytes >> 20} MiB at most")
    return int(peak_bytes > MEMORY_BYTES_MAX)


if __name__ == "__main__":
    sys.exit(main())
