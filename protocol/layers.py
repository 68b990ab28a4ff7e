"""The names of a model's layers, under which its state is kept, sent, and reported as held on a disk.

State is kept by layer: "embed", "layers.0" ... "layers.{L-1}", "head" (final norm and output projection).
"""

from shoal.protocol.spec import ModelSpec

EMBED = "embed"
HEAD = "head"


def all_layer_keys(model: ModelSpec) -> tuple[str, ...]:
    """Every layer key, in the order in which activations pass."""
    return stage_layer_keys(model, 0, model.num_layers)


def stage_layer_keys(model: ModelSpec, first: int, last: int) -> tuple[str, ...]:
    """The layers of a stage that holds decoder layers [first, last).

    The embedding belongs to whoever holds the first decoder layer, the head to whoever holds the last.
    Raises: ValueError: the range is empty or outside the model.
    """
    if not 0 <= first < last <= model.num_layers:
        raise ValueError(f"decoder layers [{first}, {last}) are not a part of [0, {model.num_layers})")
    keys = [f"layers.{index}" for index in range(first, last)]
    return (*([EMBED] if first == 0 else []), *keys, *([HEAD] if last == model.num_layers else []))
