"""The classifiers' models and data, without the packages that ship the data."""

import pytest
import torch
from classifiers import PADDING, TEXT, UNKNOWN, Images, Sentences, rated_sentences, sentences_of
from regimes import train
from settings import Method, Paper, Run, Steps
from tasks import BatchShape

from shoal.protocol.errors import DataError
from shoal.protocol.spec import OptimizerSpec

RATED = [(2.0, "What a GREAT film!"), (-1.5, "a dull, dull film"), (0.1, "it is a film"), (-3.0, "zyzzyva, no")]


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Bright above or bright below."""
    labels = torch.arange(120) % 2
    samples = torch.randn(120, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.3
    samples[labels == 0, :, :4] += 1
    return samples, labels


def sentences() -> tuple[torch.Tensor, torch.Tensor]:
    return sentences_of([(rating, text) for i in range(60) for rating, text in [*RATED[:2], (1.0, f"fine {i}")]])


def test_words_are_numbered_by_how_common_they_are_and_unclear_sentences_left_out():
    samples, labels = sentences_of(RATED)
    assert labels.tolist() == [1, 0, 0]
    assert samples.shape == (3, TEXT.context)
    assert samples[1, :5].tolist() == [2, 3, 3, 4, PADDING], "a, dull, dull, film"
    long = sentences_of([(1.0, "word " * 100)])[0]
    assert (long != PADDING).all()


def test_missing_data_is_one_error_that_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match="make bench-staleness"):
        rated_sentences(tmp_path / "none.tar.gz")


@pytest.mark.parametrize("task", [Images, Sentences])
def test_microbatches_are_a_pure_function_and_never_validation_samples(task):
    data = images() if task is Images else sentences()
    shape = BatchShape(microbatches_per_step=2, microbatch_size=4)
    one, same, other = task(shape, 0, data), task(shape, 0, data), task(shape, 1, data)
    assert all(torch.equal(a, b) for a, b in zip(one.microbatch(3, 1), same.microbatch(3, 1), strict=True))
    assert not torch.equal(one.microbatch(3, 1)[0], other.microbatch(3, 1)[0])
    assert not torch.equal(one.microbatch(3, 1)[0], one.microbatch(4, 1)[0])
    (x, targets), *_ = one.validation(brief=False)
    assert len(targets) == len(data[1]) // 5
    assert torch.equal(x, other.validation(brief=False)[0][0]), "the same samples whatever the seed"
    if task is Sentences:
        noisy, _ = one.microbatch(0, 0)
        assert ((noisy == UNKNOWN) & (noisy != PADDING)).any()


@pytest.mark.parametrize("task", [Images, Sentences])
@pytest.mark.parametrize("regime", [Steps(), Paper(stages=4)])
def test_both_learn_under_the_regimes(task, regime):
    steps = isinstance(regime, Steps)
    shape = BatchShape(microbatches_per_step=2 if steps else 1, microbatch_size=4 if steps else 8)
    run = Run(
        task="",
        shape=shape,
        regime=regime,
        method=Method(name="pipeoptim"),
        optimizer=OptimizerSpec(name="adamw", learning_rate=3e-3, warmup_steps=5),
        updates=25,
        validate_every=25,
    )
    outcome = train(task(shape, 0, images() if task is Images else sentences()), run)
    assert outcome.right is not None
    assert outcome.right > 0.8
