"""A model that is asked what it says to tokens, be it in this process's memory or in a swarm's stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal.peer.data.tokenizer import Tokenizer
from shoal.peer.model.generate import Sampler
from shoal.protocol.errors import LocalError
from shoal.protocol.spec import ModelSpec, RunSpec


@dataclass(frozen=True, slots=True)
class Origin:
    """One version of a run."""

    run: str
    era: int
    version: int


class Predictor(Protocol):
    """A model with its vocabulary.

    B samples   T tokens, at most the model's context
    """

    @property
    def model(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def name(self) -> str:
        """What it is, for people. Of a swarm: what has answered so far."""
        ...

    @property
    def spec(self) -> RunSpec | None:
        """Its run's. None: it is a folder, which does not say what it was trained on."""
        ...

    @property
    def origin(self) -> Origin | None:
        """The version that it is. None: it is a folder; or a swarm of which no version has answered, or several."""
        ...

    def loss_sum(self, tokens_BT: Tensor, targets_BT: Tensor, begins_BT: Tensor | None = None) -> float:
        """The sum of the losses of all targets that are not IGNORED, in nats. Args: begins_BT: bool, whether a document
        begins; None: attention looks across documents."""
        ...

    def log_likelihoods(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-likelihood of each target in nats, float32 [B, T]; whether the target is the likeliest token,
        bool [B, T]). A target that is IGNORED has 0 and True."""
        ...

    def stream(self, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
        """Continue `prompt`, which is not empty, token by token and without end."""
        ...


def check_vocabulary(predictor: Predictor, token_max: int, where: str) -> None:
    """Raises: LocalError: the model does not know all of the tokens."""
    if token_max >= predictor.model.vocab_size:
        raise LocalError(f"{where} has token {token_max}, and the model knows {predictor.model.vocab_size}")
