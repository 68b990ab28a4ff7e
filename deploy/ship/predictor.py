"""Defines the interface of a model to evaluate; the model is in this process's memory or in a swarm's stages."""

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
    """The origin of a model: one version of a run."""

    run: str
    era: int
    version: int


class Predictor(Protocol):
    """A model with its tokenizer. B samples   T tokens, at most the model's context"""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def name(self) -> str:
        """The model's name, to show to people. Of a swarm it includes the model versions that have answered so far."""

    @property
    def spec(self) -> RunSpec | None:
        """The spec of the model's run; None: the model is from a folder, which has no spec."""

    @property
    def origin(self) -> Origin | None:
        """The run and version of the model; None: it is a folder's model, or a swarm that has answered with no version
        yet, or with several."""

    def loss_sum(self, tokens_BT: Tensor, targets_BT: Tensor, begins_BT: Tensor | None = None) -> float:
        """Return the sum of the losses, in nats, of all targets but IGNORED ones.

        Args: begins_BT: bool, True where a document begins; None: attention crosses documents.
        """

    def log_likelihoods(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-likelihood of each target in nats, float32 [B, T]; True where the target is the most likely
        token, bool [B, T]). An IGNORED target has the values 0 and True."""

    def stream(self, prompt: Sequence[int], sampler: Sampler) -> Iterator[int]:
        """Yield the tokens that follow the prompt, which must not be empty, without end."""


def check_vocabulary(predictor: Predictor, token_max: int, where: str) -> None:
    """Raise LocalError if the model lacks a text's largest token, `token_max`. Args: where: describes the text."""
    if token_max >= predictor.model.vocab_size:
        raise LocalError(f"{where} has token {token_max}, and the model knows {predictor.model.vocab_size}")
