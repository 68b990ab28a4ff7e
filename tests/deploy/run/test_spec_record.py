import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from shoal.deploy.state.spec_record import fetch_spec, is_newer, open_spec, record_key, seal_spec
from shoal.protocol.errors import LocalError, RemoteError
from shoal.protocol.identity import Identity, PeerID
from shoal.protocol.invite import Invite
from shoal.protocol.limits import PROTOCOL_VERSION
from shoal.protocol.sim.loop import run
from shoal.protocol.spec import RunSpec, TrainingSpec, continued_spec, run_id

OWNER, STRANGER = Identity(bytes(32)), Identity(bytes([1]) * 32)
SPEC = RunSpec(name="mine", seed=7)
RUN = run_id(SPEC, OWNER.peer_id)
INVITE = Invite(PROTOCOL_VERSION, RUN, OWNER.peer_id, ("/ip4/127.0.0.1/tcp/9",))


class Shelf:
    """A directory that holds what it is given, from a time on."""

    def __init__(self, records: Mapping[str, bytes], *, from_s: float = 0.0) -> None:
        self._records, self._from_s = records, from_s

    async def store(self, key: str, subkey: str, value: bytes, *, expires_in_s: float) -> bool:
        raise AssertionError("a reader stores nothing")

    async def get(self, key: str) -> Mapping[str, bytes]:
        assert key == record_key(RUN)
        return self._records if asyncio.get_running_loop().time() >= self._from_s else {}


def opened(record: bytes) -> RunSpec:
    return open_spec(record, run=RUN, owner=OWNER.peer_id, source=STRANGER.peer_id)


def test_the_owners_record_opens_whoever_stored_it() -> None:
    assert opened(seal_spec(OWNER, SPEC)) == SPEC


def test_another_spec_of_the_owner_is_refused() -> None:
    with pytest.raises(RemoteError):
        opened(seal_spec(OWNER, RunSpec(name="mine", seed=8)))


def test_the_same_spec_signed_by_a_stranger_is_refused() -> None:
    with pytest.raises(RemoteError):
        opened(seal_spec(STRANGER, SPEC))


def test_a_changed_byte_is_refused() -> None:
    record = seal_spec(OWNER, SPEC)
    for position in range(0, len(record), 7):
        with pytest.raises(RemoteError):
            opened(record[:position] + bytes([record[position] ^ 1]) + record[position + 1 :])


def test_a_run_is_found_among_rubbish_and_later_than_asked() -> None:
    record = seal_spec(OWNER, SPEC)
    shelf = Shelf({"0": b"rubbish", STRANGER.peer_id: seal_spec(STRANGER, SPEC), "Z": record}, from_s=5.0)
    assert run(fetch_spec(shelf, INVITE, timeout_s=20.0)) == (SPEC, record)


@pytest.mark.parametrize(
    ("records", "says"),
    [({}, f"has the run {RUN}: is the host up"), ({PeerID("0"): b"rubbish"}, "unreadable")],
)
def test_a_run_that_nobody_has_is_one_sentence(records: Mapping[str, bytes], says: str) -> None:
    with pytest.raises(LocalError, match=says):
        run(fetch_spec(Shelf(records), INVITE, timeout_s=20.0))


# --- revisions ---


def steps_of(steps: int) -> RunSpec:
    return msgspec.structs.replace(SPEC, training=TrainingSpec(steps=steps))


LATER = continued_spec(SPEC, steps_of(800), at=400)
LAST = continued_spec(LATER, steps_of(900), at=800)


def test_the_newest_revision_of_the_owner_is_the_run_whoever_stored_what() -> None:
    older, newer, forged = seal_spec(OWNER, LATER), seal_spec(OWNER, LAST), seal_spec(STRANGER, LAST)
    assert newer == seal_spec(OWNER, LAST), "whoever seals it"
    for names in (("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")):
        shelf = Shelf(dict(zip(names, (older, newer, seal_spec(OWNER, SPEC)), strict=True)) | {"forged": forged})
        assert run(fetch_spec(shelf, INVITE, timeout_s=20.0)) == (LAST, newer)
    shelf = Shelf({"a": older, "forged": forged})
    assert run(fetch_spec(shelf, INVITE, timeout_s=20.0)) == (LATER, older), "a stranger's word is none"


def test_what_a_peer_knew_counts_if_it_is_newer_and_does_not_replace_the_swarm() -> None:
    shelf = Shelf({"a": seal_spec(OWNER, LATER)})
    last, first = (LAST, seal_spec(OWNER, LAST)), (SPEC, seal_spec(OWNER, SPEC))
    assert run(fetch_spec(shelf, INVITE, timeout_s=20.0, known=last)) == last
    assert run(fetch_spec(shelf, INVITE, timeout_s=20.0, known=first))[0] == LATER
    with pytest.raises(LocalError, match="nobody at the invite's addresses"):
        run(fetch_spec(Shelf({}), INVITE, timeout_s=20.0, known=last))


def test_two_of_one_revision_have_one_order_for_everybody() -> None:
    longer = continued_spec(SPEC, steps_of(801), at=400)
    elsewhere = continued_spec(SPEC, steps_of(800), at=399)
    assert is_newer(longer, LATER)
    assert not is_newer(LATER, longer)
    assert is_newer(LATER, elsewhere) != is_newer(elsewhere, LATER)
    assert not is_newer(LATER, LATER)
