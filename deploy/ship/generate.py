"""`shoal generate` lets a snapshot write, and shows the text as it comes."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.deploy.ship.base_model import base_of, whole_layer
from shoal.deploy.ship.found_snapshot import FoundSnapshot
from shoal.peer.data.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from shoal.peer.model.generate import Sampler, stream
from shoal.peer.model.layout import layer_layout
from shoal.peer.model.llama import Params
from shoal.peer.snapshot import DamagedSnapshot, log_damage
from shoal.protocol.errors import LocalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A model in memory, with its vocabulary."""

    snapshot: FoundSnapshot
    params_by_key: Mapping[str, Params]
    tokenizer: Tokenizer

    def write(self, prompt: str, num_tokens: int, sampler: Sampler) -> Iterator[str]:
        """What follows `prompt`, in parts as they are sampled; ends early where the model ends the text.

        What a terminal would take for a command is still in it. Without a prompt it begins a new document.
        Raises: LocalError: the prompt has tokens that the model does not know.
        """
        model = self.snapshot.spec.model
        said = self.tokenizer.encode([prompt], special=True)[0].tolist()
        tokens = [*self.tokenizer.beginning, *said] or list(self.tokenizer.separator)
        if max(tokens) >= model.vocab_size:
            raise LocalError(f"the prompt has token {max(tokens)}, and the model knows {model.vocab_size}")
        return self._write(tokens, num_tokens, sampler)

    def _write(self, tokens: list[int], num_tokens: int, sampler: Sampler) -> Iterator[str]:
        detokenizer = Detokenizer(self.tokenizer)
        for token in itertools.islice(
            stream(self.snapshot.spec.model, self.params_by_key, tokens, sampler), num_tokens
        ):
            if token == self.tokenizer.end_of_text:
                return
            yield detokenizer.feed(token)


def load_writer(
    snapshots: Sequence[FoundSnapshot],
    *,
    device: torch.device,
    tokenizer: Path | None = None,
    base: Path | None = None,
) -> Writer:
    """The first of `snapshots` that is sound.

    Args:
        tokenizer: where the run's tokenizer.json is, if not where its spec says.
        base: where the model is that the run's adapters stand beside, if it has any and they are not found.
    Raises: LocalError: none is sound, or the model is not here. DataError: there is no tokenizer.
    """
    damaged: DamagedSnapshot | None = None
    for snapshot in snapshots:
        vocabulary = load_tokenizer(snapshot.spec.data, path=tokenizer)
        spec, beside = snapshot.spec, base_of(snapshot, base)
        try:
            flat = {key: whole_layer(spec, key, snapshot.read(key), beside).to(device) for key in snapshot.keys}
        except DamagedSnapshot as damage:
            log_damage(damage)
            damaged = damaged or damage
            continue
        params = {key: layer_layout(spec.model, key).views(flat_N) for key, flat_N in flat.items()}
        return Writer(snapshot=snapshot, params_by_key=params, tokenizer=vocabulary)
    raise damaged or LocalError("there is no snapshot")


def fit_for_terminal(text: str) -> str:
    """The text without control characters: an untrained model writes anything, the terminal's commands too."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
