"""Two ends agree on keys in the sight of a carrier, and whatever it does to their bytes is found out."""

import pytest

from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import Identity
from shoal.protocol.live.secure_channel import RECORD_BYTES_MAX, Channel, Handshake

OPENER, OTHER, CARRIER = (Identity(bytes([number]) * 32) for number in (1, 2, 3))


def ends(*, run="run", purpose="frames", opener=OPENER, other=OTHER, expects=None) -> tuple[Handshake, Handshake]:
    return (
        Handshake(opener, other.peer_id, run=run, purpose=purpose, opens=True),
        Handshake(other, (expects or opener).peer_id, run=run, purpose=purpose, opens=False),
    )


def agree(opener: Handshake, other: Handshake) -> tuple[Channel, Channel]:
    return opener.finish(other.key, other.sign(opener.key)), other.finish(opener.key, opener.sign(other.key))


def opened(channel: Channel, received: bytes) -> bytes:
    return b"".join(channel.open(bytearray(received)))


@pytest.mark.parametrize("size", [0, 1, RECORD_BYTES_MAX, RECORD_BYTES_MAX + 1, 3 * RECORD_BYTES_MAX + 7])
def test_what_one_end_seals_the_other_opens_both_ways(size):
    data = bytes(range(256)) * (size // 256 + 1)
    here, there = agree(*ends())
    for sender, receiver in ((here, there), (there, here)) * 2:
        sealed = b"".join(sender.seal(data[:size]))
        assert opened(receiver, sealed) == data[:size]
        assert data[:32] not in sealed


def test_records_that_come_in_pieces_open_when_they_are_whole():
    here, there = agree(*ends())
    sealed, received, plain = b"".join(here.seal(bytes(100_000))), bytearray(), b""
    for start in range(0, len(sealed), 1_000):
        received += sealed[start : start + 1_000]
        plain += b"".join(there.open(received))
    assert plain == bytes(100_000)
    assert not received


def test_each_stream_has_keys_of_its_own():
    sealed = {b"".join(agree(*ends())[0].seal(b"the same")) for _ in range(2)}
    assert len(sealed) == 2


@pytest.mark.parametrize("at", [0, 3, 4, 20, -1])
def test_a_flipped_bit_does_not_open(at):
    here, there = agree(*ends())
    sealed = bytearray(b"".join(here.seal(b"sixteen and more bytes")))
    sealed[at] ^= 1
    with pytest.raises(RemoteError, match="changed on the way"):  # a greater length waits, and never opens
        opened(there, bytes(sealed) + bytes(2**17))


def test_a_record_that_is_repeated_left_out_moved_or_sent_back_does_not_open():
    def records():
        here, there = agree(*ends())
        return [b"".join(here.seal(text)) for text in (b"one", b"two")], here, there

    (one, two), here, there = records()
    assert opened(there, one) == b"one"
    with pytest.raises(RemoteError, match="changed on the way"):
        opened(there, one)
    (one, two), here, there = records()
    with pytest.raises(RemoteError, match="changed on the way"):
        opened(there, two)
    with pytest.raises(RemoteError, match="changed on the way"):
        opened(here, one)


def test_a_record_of_an_earlier_stream_does_not_open():
    before, _ = agree(*ends())
    _, there = agree(*ends())
    with pytest.raises(RemoteError, match="changed on the way"):
        opened(there, b"".join(before.seal(b"pay twice")))


def test_a_carrier_with_keys_of_its_own_is_neither_end():
    opener, other = ends()
    middle = Handshake(CARRIER, OPENER.peer_id, run="run", purpose="frames", opens=False)
    with pytest.raises(RemoteError, match="is not at the other end"):
        opener.finish(middle.key, middle.sign(opener.key))
    with pytest.raises(RemoteError, match="is not at the other end"):
        opener.finish(middle.key, other.sign(opener.key))  # the true end's word about its own key
    middle = Handshake(CARRIER, OTHER.peer_id, run="run", purpose="frames", opens=True)
    with pytest.raises(RemoteError, match="is not at the other end"):
        other.finish(middle.key, middle.sign(other.key))


def test_what_was_said_for_another_stream_does_not_count():
    opener, other = ends()
    signature = other.sign(opener.key)
    again, _ = ends()
    with pytest.raises(RemoteError, match="is not at the other end"):
        again.finish(other.key, signature)


@pytest.mark.parametrize(
    "theirs",
    [
        {"run": "another run"},
        {"purpose": "calls"},
        {"expects": CARRIER},  # it was told that somebody else opened
    ],
    ids=["run", "purpose", "opener"],
)
def test_both_ends_must_have_been_told_the_same(theirs):
    opener, other = ends()[0], ends(**theirs)[1]
    with pytest.raises(RemoteError, match="is not at the other end"):
        opener.finish(other.key, other.sign(opener.key))
    with pytest.raises(RemoteError, match="is not at the other end"):
        other.finish(opener.key, opener.sign(other.key))


def test_two_who_both_opened_do_not_agree():
    """A carrier that swaps the ends joins one's opening with the other's."""
    here = Handshake(OPENER, OTHER.peer_id, run="run", purpose="frames", opens=True)
    there = Handshake(OTHER, OPENER.peer_id, run="run", purpose="frames", opens=True)
    with pytest.raises(RemoteError, match="is not at the other end"):
        here.finish(there.key, there.sign(here.key))


def test_a_peer_does_not_agree_with_its_own_echo():
    here = Handshake(OPENER, OPENER.peer_id, run="run", purpose="frames", opens=True)
    with pytest.raises(RemoteError, match="is not at the other end"):
        here.finish(here.key, here.sign(here.key))


def test_a_key_of_small_order_is_none():
    opener, other = ends()
    other.key = bytes(32)
    with pytest.raises(RemoteError, match="an invalid key"):
        opener.finish(bytes(32), other.sign(opener.key))


@pytest.mark.parametrize("length", [0, 15, RECORD_BYTES_MAX + 17, 2**32 - 1])
def test_an_impossible_length_takes_no_memory(length):
    _, there = agree(*ends())
    with pytest.raises(RemoteError, match="changed on the way"):
        opened(there, length.to_bytes(4, "big"))
