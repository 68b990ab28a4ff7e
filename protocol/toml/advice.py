"""Finds settings in a run spec that are likely to make its run diverge or waste time, before the run begins. Pure.

Each setting is compared with the value that the rules of `defaults.py` would choose.
"""

from collections.abc import Iterator
from typing import Final

from shoal.protocol.spec import RunSpec
from shoal.protocol.toml.defaults import (
    MICROBATCHES_PER_STAGE,
    batch_tokens_of,
    learning_rate_of,
    microbatches_of,
    millions,
    size_of,
    warmup_steps_of,
)

BATCH_RANGE: Final = 16.0
"""A step gets a warning if its tokens are more than BATCH_RANGE times those of the rule, or less than 1/BATCH_RANGE."""
PASSES_MAX: Final = 16.0
"""Number of passes after which repeated text is worth half as much as new text (2305.16264, section 5)."""
PASSES_GOOD: Final = 4.0
"""Number of passes up to which repeated text is hardly worth less than new text (2305.16264)."""


def advice(spec: RunSpec, *, training_tokens: int, text_vocab_size: int) -> list[str]:
    """Return a sentence for each setting of `spec` that is likely to make the run diverge or waste time, with the value
    to set. Args: training_tokens: tokens in the training text; text_vocab_size: all tokens of the text are below it."""
    said = [*_adapter_advice(spec), *_rate_advice(spec), *_warmup_advice(spec), *_batch_advice(spec)]
    if training_tokens:
        said += _text_advice(spec, training_tokens)
    return [*said, *_vocabulary_advice(spec, text_vocab_size)]


def _rate_advice(spec: RunSpec) -> Iterator[str]:
    optimizer, size = spec.optimizer, size_of(spec.model)
    if optimizer.name == "sgd":
        return
    tunes = bool(spec.initial.digests)
    usual = learning_rate_of(
        size,
        tokens_per_step=float(spec.tokens_per_step),
        steps=spec.training.steps,
        optimizer=optimizer.name,
        tunes=tunes,
        adapts=spec.adapter is not None,
    )
    times = optimizer.learning_rate / usual
    if times > 4.0:
        yield (
            f"learning_rate {optimizer.learning_rate:g} is {times:.0f} times what suits this model and batch: the run "
            f"is likely to diverge. Set optimizer.learning_rate = {usual:g}, or leave the line out"
        )
    if times < 1 / 30:
        yield (
            f"learning_rate {optimizer.learning_rate:g} is 1/{1 / times:.0f} of what suits this model and batch: it "
            f"will learn slowly. Set optimizer.learning_rate = {usual:g}, or leave the line out"
        )


def _adapter_advice(spec: RunSpec) -> Iterator[str]:
    if spec.adapter is not None and not spec.initial.digests:
        yield (
            "the adapters train beside random weights, since the run has no base model: "
            "make its run file with `shoal import FOLDER RUN.toml --lora RANK`"
        )


def _warmup_advice(spec: RunSpec) -> Iterator[str]:
    optimizer, steps = spec.optimizer, spec.training.steps
    usual = warmup_steps_of(steps, beta2=optimizer.beta2)
    if optimizer.name != "sgd" and optimizer.warmup_steps < usual / 4:
        yield (
            f"warmup_steps {optimizer.warmup_steps} is short: the optimizer's own estimate of a gradient's size is not "
            f"yet steady then. Set optimizer.warmup_steps = {usual}, or leave the line out"
        )
    elif optimizer.warmup_steps > steps / 2 and steps > 2:
        yield (
            f"warmup_steps {optimizer.warmup_steps} is most of the run's {steps} steps. "
            f"Set optimizer.warmup_steps = {usual}, or leave the line out"
        )


def _batch_advice(spec: RunSpec) -> Iterator[str]:
    training, stages = spec.training, spec.swarm.stages_max
    usual = batch_tokens_of(size_of(spec.model))
    number, samples = microbatches_of(usual, spec.model, stages)
    remedy = f"Set training.microbatches_per_step = {number} and training.microbatch_size = {samples}"
    tokens = f"{spec.tokens_per_step:,}"
    if spec.tokens_per_step > BATCH_RANGE * usual:
        yield (
            f"a step of {tokens} tokens is {spec.tokens_per_step / usual:.0f} times what suits a model of this size: "
            f"most of its work teaches nothing. {remedy}, or leave both lines out"
        )
    elif spec.tokens_per_step * BATCH_RANGE < usual:
        yield (
            f"a step of {tokens} tokens is 1/{usual / spec.tokens_per_step:.0f} of what suits a model of this size: "
            f"its gradients are mostly noise, and peers reduce them {usual / spec.tokens_per_step:.0f} times as often "
            f"as they must. {remedy}, or leave both lines out"
        )
    if stages is not None and training.microbatches_per_step < stages:
        yield (
            f"{training.microbatches_per_step} microbatches a step cannot keep {stages} stages busy. "
            f"Set training.microbatches_per_step = {max(number, MICROBATCHES_PER_STAGE * stages)}"
        )


def _text_advice(spec: RunSpec, training_tokens: int) -> Iterator[str]:
    training = spec.training
    passes = training.steps * spec.tokens_per_step / training_tokens
    if passes > PASSES_MAX:
        steps = max(1, round(PASSES_GOOD * training_tokens / spec.tokens_per_step))
        yield (
            f"the run reads its text {passes:.0f} times over: beyond {PASSES_MAX:.0f} times it only "
            f"memorises it. Give it more text (data.source), or set training.steps = {steps} ({PASSES_GOOD:.0f} times)"
        )
    samples = training_tokens // (spec.model.context + 1)
    if samples < spec.tokens_per_step // spec.model.context:
        yield (
            f"the text is {samples} samples of {spec.model.context} tokens, fewer than one step takes. "
            "Set model.context lower, or give it more text (data.source)"
        )


def _vocabulary_advice(spec: RunSpec, text_vocab_size: int) -> Iterator[str]:
    unused = spec.model.vocab_size - text_vocab_size
    if unused >= max(1024, text_vocab_size):
        parameters = millions(float(unused * (spec.model.dim + spec.model.written_width)))
        yield (
            f"model.vocab_size {spec.model.vocab_size} is far more than the {text_vocab_size} tokens that the text "
            f"has: {parameters} parameters learn nothing. Set model.vocab_size = {text_vocab_size}"
        )
