"""The butterfly, played among its members in random order.

N elements of the gradient   C elements of a chunk
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cuts import scatter
from shoal.peer.encoding.vectors import Vectors
from shoal.peer.group.reduce import Outgoing, Reduction, part_bounds
from shoal.peer.pipeline.microbatch import bitmap_of, indices_from
from shoal.protocol.errors import RemoteError
from shoal.protocol.identity import PeerID
from shoal.protocol.messages import RoundMember, RoundStart
from shoal.protocol.wire_format import AUTO_SUMS, WireFormat, tensor_bytes

M = 16
CHUNK = 8
"""Of the tests; the real one has 262,144 elements."""


VECTORS = Vectors(torch.device("cpu"), chunk_bytes=4 * CHUNK)
payload_of = VECTORS.payload_of
KEY = (3, 5)


def round_of(counts: list[int], bandwidths: list[float] | None = None, *, form: WireFormat = "fp32") -> RoundStart:
    """Member `i` is named `i` and contributes `counts[i]` microbatches."""
    members = tuple(
        RoundMember(
            peer=PeerID(str(rank)),
            bandwidth=bandwidths[rank] if bandwidths else 1.0,
            indices=bitmap_of((1 << count) - 1),
        )
        for rank, count in enumerate(counts)
    )
    return RoundStart(
        stage=0, step=7, attempt=1, members=members, duplicates=0, given_up=0, loss_sum=0.0, staleness_sum=0, form=form
    )


def sums_of(start: RoundStart, size: int) -> list[Tensor]:
    """Of such different scales that another order of adding gives other bits."""
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator) * 10.0 ** (3 * rank % 7 - 3) for rank in range(len(start.members))]


@dataclass
class Round:
    """All members of one round and what is on its way between them."""

    start: RoundStart
    sums: list[Tensor]
    rng: random.Random
    vectors: Vectors = VECTORS
    members: dict[PeerID, Reduction] = field(default_factory=dict)
    air: list[tuple[PeerID, str, Outgoing]] = field(default_factory=list)
    heard: Counter[tuple[PeerID, PeerID, str]] = field(default_factory=Counter)
    sent_elements: Counter[PeerID] = field(default_factory=Counter)

    def begin(self) -> None:
        """Everyone hears of it at once; parts that overtake the news are the driver's business."""
        for member, sum_N in zip(self.start.members, self.sums, strict=True):
            size = len(sum_N)
            self.members[member.peer] = Reduction(member.peer, self.start, size, microbatches=M, vectors=self.vectors)
        for (peer, reduction), sum_N in zip(self.members.items(), self.sums, strict=True):
            due = reduction.begin(sum_N)
            self.send(peer, "part", scatter(reduction))
            self.add_up(peer, due)

    def add_up(self, peer: PeerID, chunks: list[int]) -> None:
        reduction = self.members[peer]
        reduction.adding(chunks)()
        self.send(peer, "result", reduction.added(chunks))

    def send(self, source: PeerID, kind: str, outgoing: list[Outgoing]) -> None:
        self.sent_elements[source] += sum(len(out.values_C) for out in outgoing)
        self.air += [(source, kind, out) for out in outgoing]

    def deliver(self, *, twice: bool = False) -> None:
        at = self.rng.randrange(len(self.air))
        source, kind, out = self.air[at] if twice else self.air.pop(at)
        to = self.members[out.target]
        payload = bytearray(
            self.vectors.piece_payload(out.values_C, out.form, out.key) if out.payload is None else out.payload
        )
        if kind == "part":
            if to.part_arrived(source, out.start, payload):
                self.add_up(out.target, [out.start])
        else:
            take_result(to, source, out.start, payload)

    def play(self, *, repeats: bool = False) -> None:
        while self.air:
            self.deliver(twice=repeats and self.rng.random() < 0.2)

    def mean(self) -> Tensor:
        """Contributors added in rank order, then divided."""
        total_N = torch.zeros_like(self.sums[0])
        counts = [indices_from(member.indices, count=M).bit_count() for member in self.start.members]
        for sum_N, count in zip(self.sums, counts, strict=True):
            if count:
                total_N += sum_N
        return total_N * (1.0 / max(1, sum(counts)))


def take_result(to: Reduction, source: PeerID, start: int, payload: bytearray) -> None:
    take = to.result_arrived(source, start, payload)
    if take is not None:
        assert take()
        to.taken(start)


ROUNDS = {
    "members": st.lists(st.tuples(st.integers(0, M), st.floats(1e-3, 1e3)), min_size=1, max_size=7),
    "size": st.integers(0, 6 * CHUNK),
    "seed": st.integers(0, 2**32),
}


@settings(max_examples=200)
@given(**ROUNDS, repeats=st.booleans())
def test_in_any_order_all_members_end_with_the_same_bits_and_those_are_the_mean(
    members: list[tuple[int, float]], size: int, seed: int, repeats: bool
) -> None:
    start = round_of([count for count, _ in members], [bandwidth for _, bandwidth in members])
    made = Round(start, sums_of(start, size), random.Random(seed))
    before = [sum_N.clone() for sum_N in made.sums]
    made.begin()
    made.play(repeats=repeats)
    for reduction in made.members.values():
        assert reduction.is_complete
        assert reduction.missing_from() == set()
        assert torch.equal(reduction.mean_N, made.mean())
    assert all(torch.equal(a, b) for a, b in zip(made.sums, before, strict=True))


@settings(max_examples=100)
@given(**ROUNDS)
def test_on_a_narrow_wire_all_members_end_with_the_same_bits_near_the_mean(
    members: list[tuple[int, float]], size: int, seed: int
) -> None:
    """bf16 keeps 8 bits: each contribution and the mean are off by 2^-9 of themselves at most."""
    narrow = Vectors(torch.device("cpu"), chunk_bytes=4 * CHUNK, sums=("bf16",))
    start = round_of([count for count, _ in members], [bandwidth for _, bandwidth in members], form="bf16")
    made = Round(start, sums_of(start, size), random.Random(seed), vectors=narrow)
    made.begin()
    made.play()
    means = [reduction.mean_N for reduction in made.members.values()]
    assert all(torch.equal(mean_N, means[0]) for mean_N in means)
    assert torch.equal(means[0], means[0].to(torch.bfloat16).to(torch.float32))
    total = sum(count for count, _ in members)
    largest_N = sum((s.abs() for s, (count, _) in zip(made.sums, members, strict=True) if count), torch.zeros(size))
    assert ((means[0] - made.mean()).abs() <= 2.0**-7 * largest_N / max(1, total) + 1e-30).all()


@settings(max_examples=50)
@given(**ROUNDS)
@pytest.mark.parametrize(("form", "of_the_largest"), [("int8", 0.02), ("hadamard4", 0.6)])
def test_in_few_bits_all_members_end_with_the_same_bits_whatever_came_twice(
    form: WireFormat, of_the_largest: float, members: list[tuple[int, float]], size: int, seed: int
) -> None:
    """Each contribution and the mean are off by a part of their largest number."""
    narrow = Vectors(torch.device("cpu"), chunk_bytes=4 * CHUNK, sums=AUTO_SUMS)
    start = round_of([count for count, _ in members], [bandwidth for _, bandwidth in members], form=form)
    made = Round(start, sums_of(start, size), random.Random(seed), vectors=narrow)
    made.begin()
    made.play(repeats=True)
    means = [reduction.mean_N for reduction in made.members.values()]
    assert all(torch.equal(mean_N, means[0]) for mean_N in means)
    total = sum(count for count, _ in members)
    largest = sum(float(s.abs().max()) for s, (count, _) in zip(made.sums, members, strict=True) if count and size)
    assert ((means[0] - made.mean()).abs() <= 2 * of_the_largest * largest / max(1, total) + 1e-30).all()


@settings(max_examples=100)
@given(**ROUNDS)
def test_missing_from_names_those_whose_word_is_still_out(
    members: list[tuple[int, float]], size: int, seed: int
) -> None:
    """Contributors who have not sent all parts of our part, and owners who have not sent all of their results."""
    start = round_of([count for count, _ in members], [bandwidth for _, bandwidth in members])
    made = Round(start, sums_of(start, size), random.Random(seed))
    made.begin()
    bounds = part_bounds([bandwidth for _, bandwidth in members], size)
    while True:
        for me, reduction in made.members.items():
            own = range(*bounds[int(me) : int(me) + 2], CHUNK)
            arrived = [(s, k, o) for s, k, o in made.air if o.target == me]
            late_parts = {s for s, kind, _ in arrived if kind == "part"}
            late_results = {
                peer
                for rank, peer in enumerate(made.members)
                if peer != me and any(chunk in reduction._missing for chunk in range(*bounds[rank : rank + 2], CHUNK))
            }
            assert reduction.missing_from() == late_parts | late_results
            assert reduction.is_complete == (not reduction.missing_from())
            assert late_parts == set() or len(own) > 0
        if not made.air:
            return
        made.deliver()


def test_a_group_of_one_needs_nobody() -> None:
    start = round_of([4])
    made = Round(start, sums_of(start, 20), random.Random(0))
    made.begin()
    assert made.air == []
    assert torch.equal(made.members[PeerID("0")].mean_N, made.sums[0] * 0.25)


def test_who_contributes_nothing_sends_no_part_and_gets_the_mean() -> None:
    """A newcomer: what its own sum holds is not counted."""
    start = round_of([2, 0, 2])
    made = Round(start, [torch.ones(24), torch.full((24,), 99.0), torch.ones(24)], random.Random(0))
    made.begin()
    assert {source for source, kind, _ in made.air if kind == "part"} == {"0", "2"}
    made.play()
    assert all(torch.equal(r.mean_N, torch.full((24,), 0.5)) for r in made.members.values())


def test_a_round_without_contributions_ends_with_zero() -> None:
    start = round_of([0, 0])
    made = Round(start, sums_of(start, 24), random.Random(0))
    made.begin()
    made.play()
    assert all(r.is_complete and not r.mean_N.any() for r in made.members.values())


@pytest.mark.parametrize("count", [2, 3, 6])
def test_each_member_sends_about_twice_the_gradient_whatever_the_groups_size(count: int) -> None:
    size = 60 * CHUNK
    start = round_of([1] * count)
    made = Round(start, sums_of(start, size), random.Random(0))
    made.begin()
    made.play()
    assert all(sent == pytest.approx(2 * size * (count - 1) / count, rel=0.02) for sent in made.sent_elements.values())


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9), st.integers(0, 10**9))
def test_parts_are_cut_by_bandwidth_to_within_one_element(bandwidths: list[float], size: int) -> None:
    bounds = part_bounds(bandwidths, size)
    assert (bounds[0], bounds[-1]) == (0, size)
    assert bounds == sorted(bounds)
    for rank, bandwidth in enumerate(bandwidths):
        fair = size * bandwidth / sum(bandwidths)
        assert abs(bounds[rank + 1] - bounds[rank] - fair) <= 1 + 1e-9 * size


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@given(st.integers(0, 40), st.integers(0, 30))
def test_payloads_are_the_little_endian_bytes(start: int, count: int) -> None:
    values_N = torch.arange(80, dtype=torch.float32)
    assert bytes(payload_of(values_N[start : start + count])) == values_N.numpy()[start : start + count].tobytes()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_gradient_in_bf16_has_two_bytes_a_number_and_is_rounded_once() -> None:
    narrow = Vectors(torch.device("cpu"), sums=("bf16",))
    values_C = torch.tensor([1.0, -3.5e38, 1.00390625, 1e-39, 0.1])
    payload = bytes(narrow.piece_payload(values_C, "bf16", KEY))
    assert len(payload) == narrow.mean_bytes * 5 == 10
    read_C = narrow.piece_of(payload, "bf16", 5)
    assert read_C[:3].tolist() == [1.0, -torch.inf, 1.0]
    assert bytes(narrow.mean_payload(read_C)) == payload
    assert narrow.round_mean(values_C, "bf16", KEY) is None
    assert torch.equal(values_C, read_C)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("form", AUTO_SUMS)
def test_a_mean_in_few_bits_is_what_others_read_and_goes_to_who_catches_up_exactly(form: WireFormat) -> None:
    narrow = Vectors(torch.device("cpu"), sums=AUTO_SUMS)
    mean_C = torch.randn(200)
    payload = narrow.round_mean(mean_C, form, KEY)
    assert payload is not None
    assert len(payload) == tensor_bytes(form, 200)
    assert torch.equal(mean_C, narrow.piece_of(payload, form, 200))
    assert torch.equal(mean_C, narrow.mean_of(bytes(narrow.mean_payload(mean_C))))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("counts", [[3], [2, 1, 0, 4]])
@pytest.mark.parametrize("form", [*AUTO_SUMS, "bf16", "fp32"])
def test_a_mean_that_came_in_few_bits_is_kept_as_it_came_too(form: WireFormat, counts: list[int]) -> None:
    """Of all its parts: our own, and those of others."""
    size = 1000
    vectors = Vectors(torch.device("cpu"), chunk_bytes=4 * 64, sums=(form,))
    start = round_of(counts, [1.0, 3.0, 2.0, 2.0][: len(counts)], form=form)
    played = Round(start, sums_of(start, size), random.Random(0), vectors)
    played.begin()
    played.play()
    for reduction in played.members.values():
        pieces = reduction.pieces
        if form in ("bf16", "fp32"):
            assert pieces == ()
            continue
        assert sum(len(piece.payload) for piece in pieces if piece.payload is not None) < 1.2 * tensor_bytes(form, size)
        ends = [0]
        for piece in pieces:
            assert piece.payload is not None
            read_C = vectors.piece_of(bytes(piece.payload), piece.form, piece.size)
            assert torch.equal(read_C, reduction.mean_N[piece.start : piece.start + piece.size])
            assert piece.start == ends[-1]
            ends.append(piece.start + piece.size)
        assert ends[-1] == size


def test_a_contribution_has_the_same_bytes_however_often_it_is_sent_and_no_other_is_rounded_as_it_is() -> None:
    narrow = Vectors(torch.device("cpu"), chunk_bytes=4 * 64, sums=("hadamard4",))
    start = round_of([1, 1, 1], form="hadamard4")
    sum_N = torch.ones(6 * 64) * torch.randn(64).repeat(6)
    sent: list[list[bytes]] = []
    for me in ("0", "0", "1"):
        reduction = Reduction(PeerID(me), start, len(sum_N), microbatches=M, vectors=narrow)
        reduction.begin(sum_N)
        pieces = reduction.scatter_to(PeerID("2"))
        sent.append([bytes(narrow.piece_payload(out.values_C, out.form, out.key)) for out in pieces])
    assert sent[0] == sent[1]
    assert len({*sent[0], *sent[2]}) == 4, "of the same numbers, by other chances"


# --- from peers that break the protocol ---


@pytest.fixture
def waiting() -> Reduction:
    """Member 1 of 0, 1, 2, of which 2 contributes nothing; parts are 0..16, 16..32 and 32..48."""
    start = round_of([1, 1, 0])
    reduction = Reduction(PeerID("1"), start, 48, microbatches=M, vectors=VECTORS)
    assert reduction.begin(torch.ones(48)) == []
    return reduction


def floats(count: int, value: float = 1.0) -> bytearray:
    return bytearray(payload_of(torch.full((count,), value)))


@pytest.mark.parametrize(
    ("source", "start", "payload"),
    [
        ("0", 16, floats(CHUNK - 1)),
        ("0", 16, floats(CHUNK + 1)),
        ("0", 16, bytearray(4 * CHUNK - 1)),
        ("0", 16, bytearray()),
        ("0", 17, floats(CHUNK)),
        ("0", 0, floats(CHUNK)),
        ("0", 32, floats(CHUNK)),
        ("0", -8, floats(CHUNK)),
        ("0", 2**40, floats(CHUNK)),
        ("2", 16, floats(CHUNK)),
        ("stranger", 16, floats(CHUNK)),
    ],
)
def test_a_part_that_the_round_has_not_is_its_senders_fault(
    waiting: Reduction, source: str, start: int, payload: bytearray
) -> None:
    with pytest.raises(RemoteError) as caught:
        waiting.part_arrived(PeerID(source), start, payload)
    assert caught.value.peer_id == source
    assert waiting.missing_from() == {"0", "2"}
    assert waiting.part_arrived(PeerID("0"), 16, floats(CHUNK, 3.0))
    waiting.adding([16])()
    outgoing = waiting.added([16])
    assert [(out.target, out.start) for out in outgoing] == [("0", 16), ("2", 16)]
    assert all(torch.equal(out.values_C, torch.full((CHUNK,), 2.0)) for out in outgoing)


@pytest.mark.parametrize(
    ("source", "start", "payload"),
    [
        ("0", 0, floats(CHUNK - 1)),
        ("0", 0, bytearray()),
        ("0", 4, floats(CHUNK)),
        ("0", 32, floats(CHUNK)),
        ("0", 16, floats(CHUNK)),
        ("1", 16, floats(CHUNK)),
        ("2", 0, floats(CHUNK)),
        ("stranger", 0, floats(CHUNK)),
    ],
)
def test_a_result_that_is_not_its_senders_to_give_is_refused(
    waiting: Reduction, source: str, start: int, payload: bytearray
) -> None:
    with pytest.raises(RemoteError) as caught:
        waiting.result_arrived(PeerID(source), start, payload)
    assert caught.value.peer_id == source
    assert waiting.missing_from() == {"0", "2"}


NONE_OF_A_GRADIENT = [torch.nan, torch.inf, -torch.inf, 2.0**41, -(2.0**41)]


@pytest.mark.parametrize("value", NONE_OF_A_GRADIENT)
def test_a_contribution_that_is_no_gradient_is_left_out_of_its_chunk_and_named(
    waiting: Reduction, value: float
) -> None:
    wrong = torch.full((CHUNK,), 3.0)
    wrong[CHUNK - 1] = value
    assert waiting.part_arrived(PeerID("0"), 16, bytearray(payload_of(wrong)))
    assert waiting.adding([16])() == {"0"}
    waiting.added([16])
    assert torch.equal(waiting.mean_N[16 : 16 + CHUNK], torch.ones(CHUNK)), "the mean of our one microbatch"
    assert waiting.part_arrived(PeerID("0"), 24, floats(CHUNK, 3.0))
    assert waiting.adding([24])() == set()
    waiting.added([24])
    assert torch.equal(waiting.mean_N[24 : 24 + CHUNK], torch.full((CHUNK,), 2.0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2.0**45])
def test_a_result_that_is_no_gradient_is_not_taken_and_may_come_again(waiting: Reduction, value: float) -> None:
    take = waiting.result_arrived(PeerID("0"), 0, floats(CHUNK, value))
    assert take is not None
    assert not take()
    waiting.refused(PeerID("0"), 0)
    assert waiting.refused_from == {"0"}
    assert "0" in waiting.missing_from()
    take_result(waiting, PeerID("0"), 0, floats(CHUNK, 1.0))
    assert torch.equal(waiting.mean_N[:CHUNK], torch.ones(CHUNK))


def test_a_result_that_was_given_is_not_taken_back(waiting: Reduction) -> None:
    """The optimizer may already be reading it."""
    take_result(waiting, PeerID("0"), 0, floats(CHUNK, 1.0))
    assert waiting.result_arrived(PeerID("0"), 0, floats(CHUNK, 5.0)) is None
    assert torch.equal(waiting.mean_N[:CHUNK], torch.ones(CHUNK))


def test_a_part_that_comes_again_after_its_chunk_is_done_changes_nothing_and_is_not_kept(waiting: Reduction) -> None:
    assert waiting.part_arrived(PeerID("0"), 16, floats(CHUNK, 3.0))
    add = waiting.adding([16])
    assert not waiting.part_arrived(PeerID("0"), 16, floats(CHUNK, 7.0)), "while it is added up"
    add()
    waiting.added([16])
    assert not waiting.part_arrived(PeerID("0"), 16, floats(CHUNK, 7.0))
    assert torch.equal(waiting.mean_N[16 : 16 + CHUNK], torch.full((CHUNK,), 2.0))
    assert waiting._arrived == {}


def test_what_comes_before_our_own_sum_is_made_waits_for_it() -> None:
    start = round_of([1, 1])
    reduction = Reduction(PeerID("0"), start, 2 * CHUNK, microbatches=M, vectors=VECTORS)
    assert not reduction.part_arrived(PeerID("1"), 0, floats(CHUNK, 3.0))
    assert scatter(reduction) == []
    assert reduction.begin(torch.ones(2 * CHUNK)) == [0]
    reduction.adding([0])()
    assert [(out.target, out.start) for out in reduction.added([0])] == [("1", 0)]
    assert torch.equal(reduction.mean_N[:CHUNK], torch.full((CHUNK,), 2.0))


@given(
    counts=st.lists(st.integers(0, M), min_size=2, max_size=6),
    learners=st.sets(st.integers(0, 5)),
    size=st.integers(0, 6 * CHUNK),
    seed=st.integers(0, 2**32),
)
def test_who_is_light_owns_no_part_contributes_and_gets_the_same_bits(
    counts: list[int], learners: set[int], size: int, seed: int
) -> None:
    learners = {rank for rank in learners if rank < len(counts)}
    if len(learners) == len(counts):
        learners.remove(min(learners))
    start = msgspec.structs.replace(round_of(counts), learners=tuple(PeerID(str(rank)) for rank in sorted(learners)))
    made = Round(start, sums_of(start, size), random.Random(seed))
    made.begin()
    assert all(out.target not in start.learners for _, kind, out in made.air if kind == "part")
    assert all(source not in start.learners for source, kind, _ in made.air if kind == "result")
    made.play()
    assert all(torch.equal(reduction.mean_N, made.mean()) for reduction in made.members.values())
