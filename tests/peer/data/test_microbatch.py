"""B samples, T tokens, N bytes."""

import dataclasses
import itertools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.microbatch import ROUND, microbatch, passes, permuted, shares, validation_microbatch
from shoal.protocol.errors import DataError
from shoal.protocol.spec import ModelSpec, RunSpec, TrainingSpec

VALIDATION_BYTE = 255


def corpus_of(num_training: int, num_validation: int) -> Corpus:
    """Training bytes tell their position modulo 251, validation bytes are all 255."""
    text_N = torch.arange(num_training + num_validation) % 251
    text_N[num_training:] = VALIDATION_BYTE
    return Corpus(text_N=text_N.to(torch.uint8), num_training=num_training, num_files=1, digest="")


def spec_of(*, context: int = 7, M: int = 3, B: int = 2, seed: int = 0, validation_microbatches: int = 4) -> RunSpec:
    return RunSpec(
        seed=seed,
        model=ModelSpec(context=context),
        training=TrainingSpec(
            microbatches_per_step=M, microbatch_size=B, validation_microbatches=validation_microbatches
        ),
    )


@given(size=st.integers(1, 300), key=st.binary(min_size=32, max_size=32))
def test_the_order_of_a_pass_is_a_permutation(size: int, key: bytes) -> None:
    assert sorted(permuted(place, size, key=key) for place in range(size)) == list(range(size))


def test_the_order_is_not_the_natural_one_and_changes_with_the_key() -> None:
    orders = {tuple(permuted(place, 64, key=bytes([k] * 32)) for place in range(64)) for k in range(20)}
    assert len(orders) == 20
    assert tuple(range(64)) not in orders


def test_neighbouring_places_are_scattered() -> None:
    """Steps between neighbours of a random order of n average n / 3."""
    places = [permuted(place, 1000, key=b"k" * 32) for place in range(1000)]
    mean = sum(abs(a - b) for a, b in itertools.pairwise(places)) / 999
    assert 280 < mean < 390


@given(
    context=st.integers(1, 9),
    M=st.integers(1, 4),
    B=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
    num_training=st.integers(10, 200),
)
def test_a_pass_predicts_every_byte_once(context: int, M: int, B: int, seed: int, num_training: int) -> None:
    spec = spec_of(context=context, M=M, B=B, seed=seed)
    corpus = corpus_of(num_training, 20)
    num_blocks = (num_training - 1) // context
    samples = [
        (tokens_T, targets_T)
        for position in range(-(-num_blocks // B))
        for tokens_BT, labels in [microbatch(corpus, spec, *divmod(position, M))]
        for tokens_T, targets_T in zip(tokens_BT, labels.targets_BT, strict=True)
    ][:num_blocks]
    targets = sorted(int(target) for _, targets_T in samples for target in targets_T)
    assert targets == sorted((i + 1) % 251 for i in range(num_blocks * context))
    for tokens_T, targets_T in samples:
        assert torch.equal((tokens_T + 1) % 251, targets_T)


@given(step=st.integers(0, 1000), index=st.integers(0, 2), seed=st.integers(0, 99))
def test_training_never_touches_validation(step: int, index: int, seed: int) -> None:
    tokens_BT, labels = microbatch(corpus_of(150, 60), spec_of(seed=seed), step, index)
    targets_BT = labels.targets_BT
    assert tokens_BT.shape == targets_BT.shape == (2, 7)
    assert tokens_BT.dtype == targets_BT.dtype == torch.int64
    assert not tokens_BT.eq(VALIDATION_BYTE).any()
    assert not targets_BT.eq(VALIDATION_BYTE).any()


@given(step=st.integers(0, 10**9), index=st.integers(0, 2))
def test_a_microbatch_is_a_pure_function_of_its_address(step: int, index: int) -> None:
    first = microbatch(corpus_of(150, 60), spec_of(), step, index)
    torch.manual_seed(step)
    again = microbatch(corpus_of(150, 60), spec_of(), step, index)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1].targets_BT, again[1].targets_BT)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    """Peers of one run must agree; a change of these numbers is a change of the protocol."""
    assert [permuted(place, 10, key=bytes(32)) for place in range(10)] == [8, 9, 1, 5, 6, 7, 4, 0, 3, 2]
    tokens_BT, _ = microbatch(corpus_of(2000, 60), spec_of(seed=5), 3, 1)
    assert tokens_BT[:, 0].tolist() == [187, 77]


def test_seeds_and_passes_have_their_own_order() -> None:
    corpus = corpus_of(1 + 7 * 6, 60)  # 6 blocks, which is one step: each step is a pass
    first, second, other = (
        torch.cat([microbatch(corpus, spec_of(seed=seed), step, index)[0] for index in range(3)])[:, 0].tolist()
        for seed, step in ((0, 0), (0, 1), (1, 0))
    )
    assert sorted(first) == sorted(second) == sorted(other) == [0, 7, 14, 21, 28, 35]
    assert first != second
    assert first != other


@given(num_validation=st.integers(10, 300), count=st.integers(1, 5), B=st.integers(1, 3))
def test_validation_is_spread_over_its_text_and_repeats_only_if_there_is_too_little(
    num_validation: int, count: int, B: int
) -> None:
    corpus = corpus_of(100, num_validation)
    corpus.text_N[100:] = torch.arange(num_validation) % 251
    spec = spec_of(B=B, validation_microbatches=count)
    starts = torch.cat([validation_microbatch(corpus, spec, i)[0][:, 0] for i in range(count)]).tolist()
    num_blocks = (num_validation - 1) // 7
    assert len(set(starts)) == min(num_blocks, count * B)
    if count * B == num_blocks and num_validation <= 251:
        assert starts == [7 * block for block in range(num_blocks)]


def test_validation_does_not_depend_on_the_seed() -> None:
    corpus = corpus_of(100, 200)
    one, two = (validation_microbatch(corpus, spec_of(seed=seed), 1) for seed in (0, 1))
    assert torch.equal(one[1].targets_BT, two[1].targets_BT)


@pytest.mark.parametrize(("step", "index"), [(-1, 0), (0, -1), (0, 3)])
def test_an_address_outside_the_run_is_refused(step: int, index: int) -> None:
    with pytest.raises(ValueError, match="no microbatch"):
        microbatch(corpus_of(150, 60), spec_of(), step, index)


def test_a_validation_address_outside_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no validation microbatch"):
        validation_microbatch(corpus_of(150, 60), spec_of(), 4)


def test_text_shorter_than_a_sample_is_refused() -> None:
    with pytest.raises(DataError, match="too few"):
        microbatch(corpus_of(7, 60), spec_of(), 0, 0)


def mixed(spec: RunSpec, *weights: float) -> Corpus:
    """Sources of 10, 20, 30 … blocks, whose bytes say which source they are of; validation has 100 more."""
    corpora = [
        Corpus(
            text_N=torch.full((2 * (k + 1) * 10 * spec.model.context + 2,), k, dtype=torch.uint8),
            num_training=(k + 1) * 10 * spec.model.context + 1,
            num_files=1,
            digest=str(k),
        )
        for k in range(len(weights))
    ]
    for corpus in corpora:
        corpus.text_N[corpus.num_training :] += 100
    return dataclasses.replace(corpora[0], others=tuple(corpora[1:]), weights=weights)


def sources_of(corpus: Corpus, spec: RunSpec, steps: int) -> list[int]:
    M = spec.training.microbatches_per_step
    return [
        int(sample_T[0])
        for step in range(steps)
        for index in range(M)
        for sample_T in microbatch(corpus, spec, step, index)[0]
    ]


@pytest.mark.parametrize("seed", [0, 3])
def test_each_source_has_its_share_of_every_round_in_an_order_of_its_own(seed: int) -> None:
    spec = spec_of(M=8, B=4, seed=seed)
    found = sources_of(mixed(spec, 5.0, 2.0, 1.0), spec, ROUND // 32 * 2)
    rounds = [found[:ROUND], found[ROUND:]]
    assert [[part.count(k) for k in range(3)] for part in rounds] == [[640, 256, 128]] * 2
    assert rounds[0] != rounds[1]
    assert all(0 < found[at : at + 64].count(0) < 64 for at in range(0, len(found), 64))


def test_each_source_goes_through_whole_passes_of_its_own() -> None:
    spec = spec_of(M=8, B=4, context=7)
    corpus = mixed(spec, 3.0, 1.0)
    for k, source in enumerate(corpus.sources):
        source.text_N[: source.num_training] = torch.arange(source.num_training) // 7 + 100 * k
    found = sources_of(corpus, spec, 64)
    of_first, of_second = ([one for one in found if one // 100 == k] for k in range(2))
    passes = [of_first[at : at + 10] for at in range(0, len(of_first) - 9, 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) > len(passes) // 2
    assert sorted(of_second[:20]) == list(range(100, 120))


def test_passes_are_how_often_each_source_is_gone_through() -> None:
    spec = spec_of(M=8, B=4)
    spec = msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, steps=64))  # two rounds
    corpus = mixed(spec, 3.0, 1.0)
    found = sources_of(corpus, spec, 64)
    assert passes(corpus, spec) == (found.count(0) / 10, found.count(1) / 20)
    assert passes(corpus_of(1 + 7 * 64, 60), spec) == (32.0,)


def test_validation_has_each_source_by_its_weight() -> None:
    spec = spec_of(B=2, validation_microbatches=5)
    corpus = mixed(spec, 7.0, 2.0, 1.0)
    found = [int(row[0]) for i in range(5) for row in validation_microbatch(corpus, spec, i)[0]]
    assert [found.count(100 + k) for k in range(3)] == [7, 2, 1]


@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9), total=st.integers(9, 200))
def test_shares_add_up_and_none_is_empty(weights: list[float], total: int) -> None:
    found = shares(weights, total)
    assert sum(found) == total
    assert min(found) >= 1
    for share, weight in zip(found, weights, strict=True):
        assert share <= weight / sum(weights) * total + 1


def test_the_order_of_sources_is_the_same_on_every_machine_and_version() -> None:
    """Peers of one run must agree; a change of these numbers is a change of the protocol."""
    spec = spec_of(M=8, B=4, seed=5)
    assert sources_of(mixed(spec, 5.0, 2.0, 1.0), spec, 1)[:24] == [
        1,
        0,
        0,
        0,
        0,
        1,
        0,
        1,
        2,
        2,
        1,
        0,
        0,
        0,
        0,
        0,
        2,
        0,
        0,
        0,
        0,
        1,
        0,
        0,
    ]
