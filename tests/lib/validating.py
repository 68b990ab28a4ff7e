"""The validation loss of a run in one process: the oracle beside `single_process.train`."""

from collections.abc import Mapping

import torch
from single_process import weighed_loss

from shoal.peer.data.corpus import Corpus
from shoal.peer.data.microbatch import validation_microbatch
from shoal.peer.model.documents import Documents
from shoal.peer.model.layout import all_layer_keys
from shoal.peer.model.llama import Params, rotary_tables, run_layers
from shoal.protocol.spec import RunSpec


@torch.no_grad()
def validate(spec: RunSpec, corpus: Corpus, params_by_key: Mapping[str, Params]) -> float:
    """Mean loss over the run's validation microbatches, in nats a token."""
    keys = all_layer_keys(spec.model)
    rotary = rotary_tables(spec.model)
    total = 0.0
    for index in range(spec.training.validation_microbatches):
        tokens_BT, labels = validation_microbatch(corpus, spec, index)
        documents, here = Documents.of(labels.begins_BT, rotary)
        logits = run_layers(spec.model, keys, params_by_key, tokens_BT, here, documents=documents)
        total += weighed_loss(logits, labels).item()
    return total / spec.training.validation_microbatches
