"""Layer keys: the names under which a model's state is stored and sent. Pure.

State is kept by layer: "embed", "layers.0" ... "layers.{L-1}", "head" (final norm and output projection). If a run
places experts on members of their own, state is kept by unit: "layers.3.experts.5" for an expert, and "layers.3.trunk"
for the rest of layer 3.
"""

from typing import Final

from shoal.protocol.plan import Plan
from shoal.protocol.spec import ModelSpec

EMBED = "embed"
HEAD = "head"
EXPERTS: Final = "experts"
TRUNK: Final = "trunk"


def layer_index(key: str) -> int:
    """Return the number i of the decoder layer with the key "layers.i". Raises: ValueError: `key` has another form."""
    prefix, _, index = key.partition(".")
    if prefix != "layers" or not index.isdecimal():
        raise ValueError(f"{key!r} is not the key of a decoder layer")
    return int(index)


def expert_key(key: str, expert: int) -> str:
    """Return the key of one expert of the decoder layer `key`."""
    return f"{key}.{EXPERTS}.{expert}"


def trunk_key(key: str) -> str:
    """Return the key of the trunk of decoder layer `key`: the layer without its experts."""
    return f"{key}.{TRUNK}"


def all_layer_keys(model: ModelSpec) -> tuple[str, ...]:
    """Return every layer key, in forward order."""
    return stage_layer_keys(model, 0, model.num_layers)


def stage_layer_keys(model: ModelSpec, first: int, last: int) -> tuple[str, ...]:
    """Return the layer keys of a stage with decoder layers [first, last), in forward order.

    A model's first stage also has the embedding, and the last stage has the head.

    Raises: ValueError: the range is empty or outside the model.
    """
    if not 0 <= first < last <= model.num_layers:
        raise ValueError(f"decoder layers [{first}, {last}) are not a part of [0, {model.num_layers})")
    keys = [f"layers.{index}" for index in range(first, last)]
    return (*([EMBED] if first == 0 else []), *keys, *([HEAD] if last == model.num_layers else []))


def trunk_keys(model: ModelSpec, first: int, last: int) -> tuple[str, ...]:
    """Return the keys that a stage of decoder layers [first, last) holds if its experts are placed on other members."""
    keys = stage_layer_keys(model, first, last)
    return tuple(key if key in (EMBED, HEAD) else trunk_key(key) for key in keys)


def expert_keys(first: int, last: int, expert: int) -> tuple[str, ...]:
    """Return the keys of one expert in all decoder layers [first, last)."""
    return tuple(expert_key(f"layers.{index}", expert) for index in range(first, last))


def held_keys(model: ModelSpec, *, placed: bool) -> tuple[str, ...]:
    """Return all keys of a run's state: of its layers, or of its units if experts are `placed` on their own members."""
    if not placed:
        return all_layer_keys(model)
    experts = (expert_keys(0, model.num_layers, expert) for expert in range(model.num_experts))
    return (*trunk_keys(model, 0, model.num_layers), *(key for keys in experts for key in keys))


def group_keys(model: ModelSpec, plan: Plan, group: int) -> tuple[str, ...]:
    """Return the keys that the members of a group of `plan` hold."""
    if group < len(plan.stages):
        return (trunk_keys if plan.experts else stage_layer_keys)(model, *plan.stages[group].layers)
    entry = plan.experts[group - len(plan.stages)]
    return expert_keys(*plan.stages[entry.stage].layers, entry.expert)
