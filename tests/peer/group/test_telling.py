import asyncio
from typing import Any, cast

from shoal.peer.group.telling import Telling
from shoal.peer.replica.commands import Tell
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import Digest, Progress
from shoal.protocol.sim.loop import run

ME, LEAD, B, C = PeerID("me"), PeerID("lead"), PeerID("b"), PeerID("c")


def word(count: int, step: int = 0) -> Progress:
    return Progress(
        incarnation=0,
        count=count,
        stage=0,
        step=step,
        indices=b"",
        leader=LEAD,
        claimed=b"",
        loss_sum=0,
        staleness_sum=0,
    )


class Posted:
    """Stands in for the outbox: (when, to whom, which word)."""

    def __init__(self) -> None:
        self.words: list[tuple[float, PeerID, int, int]] = []

    def post(self, peer: PeerID, key: object, message: Progress | Digest) -> None:
        """Of a digest, its version and 0."""
        said = (message.version, 0) if isinstance(message, Digest) else (message.step, message.count)
        self.words.append((asyncio.get_running_loop().time(), peer, *said))


def made() -> tuple[Telling, Posted]:
    posted = Posted()
    return Telling(ME, cast(Any, posted), lambda message: [LEAD, B, C]), posted


def test_the_lead_hears_at_once_and_the_others_the_last_word_within_a_second() -> None:
    async def main() -> None:
        telling, posted = made()
        for count in (1, 2):
            telling.tell(Tell(word(count), can_wait=True))
            await asyncio.sleep(0.25)
        assert posted.words == [(0.0, LEAD, 0, 1), (0.25, LEAD, 0, 2)]
        await asyncio.sleep(1.0)
        assert posted.words[2:] == [(1.0, B, 0, 2), (1.0, C, 0, 2)]

    run(main())


def test_what_everybody_has_heard_is_not_said_again() -> None:
    async def main() -> None:
        telling, posted = made()
        telling.tell(Tell(word(1), can_wait=True))
        telling.tell(Tell(word(2, step=1), can_wait=True))
        telling.tell(Tell(word(3)))
        await asyncio.sleep(5.0)
        assert [entry[2:] for entry in posted.words if entry[1] == B] == [(0, 3), (1, 2)]

    run(main())


def test_of_what_is_committed_meanwhile_the_others_do_not_hear() -> None:
    async def main() -> None:
        telling, posted = made()
        telling.tell(Tell(word(1), can_wait=True))
        telling.tell(Tell(word(2, step=1), can_wait=True))
        telling.tell(Tell(Digest(stage=0, version=1, digest="")))
        await asyncio.sleep(5.0)
        assert [entry[2:] for entry in posted.words if entry[1] == B] == [(1, 0), (1, 2)]

    run(main())


def test_once_closed_it_says_nothing() -> None:
    async def main() -> None:
        telling, posted = made()
        telling.tell(Tell(word(1), can_wait=True))
        telling.close()
        await asyncio.sleep(5.0)
        assert [peer for _, peer, _, _ in posted.words] == [LEAD]

    run(main())


def test_a_word_to_one_is_for_nobody_else() -> None:
    async def main() -> None:
        telling, posted = made()
        telling.tell(Tell(word(1), to=B))
        await asyncio.sleep(5.0)
        assert posted.words == [(0.0, B, 0, 1)]

    run(main())


def test_the_lead_itself_tells_everybody_at_once() -> None:
    async def main() -> None:
        posted = Posted()
        telling = Telling(LEAD, cast(Any, posted), lambda message: [B, C])
        telling.tell(Tell(word(1), can_wait=True))
        assert [peer for _, peer, _, _ in posted.words] == [B, C]

    run(main())


def test_a_word_that_can_rest_waits_for_one_that_cannot() -> None:
    async def main() -> None:
        telling, posted = made()
        for count in (1, 2):
            telling.tell(Tell(word(count), can_wait=True, can_rest=True))
        await asyncio.sleep(0.5)
        assert posted.words == []
        telling.tell(Tell(word(3), can_wait=True))
        assert posted.words == [(0.5, LEAD, 0, 3)]
        await asyncio.sleep(5.0)
        assert posted.words[1:] == [(1.0, B, 0, 3), (1.0, C, 0, 3)]

    run(main())


def test_if_none_follows_the_lead_hears_it_within_a_second() -> None:
    async def main() -> None:
        telling, posted = made()
        telling.tell(Tell(word(1), can_wait=True, can_rest=True))
        await asyncio.sleep(5.0)
        assert posted.words == [(1.0, LEAD, 0, 1), (1.0, B, 0, 1), (1.0, C, 0, 1)]

    run(main())


def test_the_lead_itself_lets_its_words_rest() -> None:
    async def main() -> None:
        posted = Posted()
        telling = Telling(LEAD, cast(Any, posted), lambda message: [B, C])
        for count in (1, 2, 3):
            telling.tell(Tell(word(count), can_wait=True, can_rest=True))
        await asyncio.sleep(5.0)
        assert posted.words == [(1.0, B, 0, 3), (1.0, C, 0, 3)]

    run(main())


def test_a_step_that_is_over_leaves_nothing_to_say() -> None:
    async def main() -> None:
        telling, posted = made()
        telling.tell(Tell(word(1), can_wait=True, can_rest=True))
        telling.tell(Tell(Digest(stage=0, version=1, digest="d")))
        await asyncio.sleep(5.0)
        assert posted.words == [(0.0, LEAD, 1, 0), (0.0, B, 1, 0), (0.0, C, 1, 0)]

    run(main())
