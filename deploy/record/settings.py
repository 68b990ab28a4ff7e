"""What a user has set once about records, for all runs on this machine."""

from typing import Any

import msgspec

from shoal.protocol.errors import LocalError


class RecordSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    keep_record: bool | None = None
    """Keep a record of each run: record.jsonl, and a file for TensorBoard. Not set: hosts do, volunteers do not."""

    wandb_project: str = ""
    """Send each record to this project at Weights & Biases, too. Empty: none."""


def parse_record_value(name: str, text: str) -> Any:
    """Read a value as a person writes it. Raises: LocalError."""
    if name == "wandb_project":
        return text.strip()
    try:
        return msgspec.convert(text.strip(), bool, strict=False)
    except msgspec.ValidationError as error:
        raise LocalError(f"{name} is true or false, not {text.strip()!r}") from error
