import asyncio
from pathlib import Path

import pytest

from shoal.deploy.ship.scores import Score, keep_evaluation, tell_scores


def test_what_is_evaluated_while_a_peer_is_up_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    said: asyncio.Queue[str] = asyncio.Queue()

    async def main() -> list[str]:
        telling = asyncio.create_task(tell_scores("run", said.put_nowait, every_s=0.01))
        await asyncio.sleep(0.1)
        keep_evaluation("another", 0, 8, [Score(name="validation", loss=1.0)])
        keep_evaluation("run", 0, 8, [Score(name="arc acc", value=0.25, examples=40), Score(name="b", loss=2.0)])
        first = [await asyncio.wait_for(said.get(), 20) for _ in range(2)]
        keep_evaluation("run", 0, 12, [Score(name="arc acc", value=0.5)])
        second = await asyncio.wait_for(said.get(), 20)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        return [*first, second]

    keep_evaluation("run", 0, 4, [Score(name="arc acc", value=0.125)])  # before it came up
    assert asyncio.run(main()) == [
        "shoal eval, version 8: arc acc: 0.2500, 40 examples",
        "shoal eval, version 8: b: loss 2.0000 nats a token",
        "shoal eval, version 12: arc acc: 0.5000",
    ]
    assert said.empty()
