"""What a person reads about a file of theirs: its own names, what is wrong, no `$`, no type of ours."""

from typing import Literal

import msgspec
import pytest

from shoal.protocol.complaint import complaint, misspelt, unread


class Boat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    oars: int = 2
    paint: Literal["red", "blue"] | None = None
    length_m: float = 3.0
    crew: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.oars < 0:
            raise ValueError("oars must not be negative")


class Harbour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    boat: Boat = Boat()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x"\n[boat]\noar = 2', "[boat] has no 'oar': did you mean oars?"),
        ('name = "x"\n[boat]\nqqq = 2', "[boat] has no 'qqq': there are oars, paint, length_m, crew"),
        ("port = 2", "there is no 'port': there are name, boat"),
        ("[boat]", "name is missing"),
        ('name = "x"\n[boat]\noars = "two"', "boat.oars must be a whole number, not a text in quotes"),
        ('name = "x"\n[boat]\noars = 1.5', "boat.oars must be a whole number, not a fraction"),
        ('name = "x"\n[boat]\ncrew = [1]', "boat.crew[0] must be a text in quotes, not a whole number"),
        ('name = "x"\nboat = 1', "boat must be a table, not a whole number"),
        ('name = "x"\n[boat]\npaint = "grey"', "boat.paint cannot be 'grey': it is one of red, blue"),
        ('name = "x"\n[boat]\noars = -1', "[boat] oars must not be negative"),
        ('name = "x', "not well formed: Unterminated string (at end of document)"),
    ],
)
def test_a_complaint_names_the_field_as_its_author_does(text: str, said: str) -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.toml.decode(text, type=Harbour)
    assert complaint(caught.value, Harbour) == said


def test_a_list_where_a_table_belongs() -> None:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(b"[]", type=Harbour)
    assert complaint(caught.value, Harbour) == "the whole must be a table, not a list"


class _Item(msgspec.Struct, forbid_unknown_fields=True):
    tflops: float = 1.0


class _Lists(msgspec.Struct, forbid_unknown_fields=True):
    item: tuple[_Item, ...] = ()
    deep: _Item | None = None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[item]]\ntflop = 2", "[item[0]] has no 'tflop': did you mean tflops?"),
        ("[deep]\nflops = 2", "[deep] has no 'flops': did you mean tflops?"),
        ('[[item]]\n[[item]]\ntflops = "x"', "item[1].tflops must be a number, not a text in quotes"),
    ],
)
def test_fields_inside_lists_and_optional_tables_are_known(text: str, says: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.toml.decode(text, type=_Lists)
    assert complaint(caught.value, _Lists) == says


class _Network(msgspec.Struct):
    devices: list[str]
    device_regions: list[str]
    name: str = ""
    num_stages: int = 0


def test_a_misspelt_field_is_found_where_more_may_be_said() -> None:
    assert misspelt({"item": [], "note": 3}, _Lists) == ""
    assert misspelt({"items": []}, _Lists) == ""
    assert misspelt({"num_devices": 2, "device_model": "V100", "names": [], "regions": []}, _Network) == ""
    assert misspelt({"device": []}, _Network) == "there is no 'device': did you mean devices?"
    assert misspelt([], _Lists) == ""
    assert unread({"item": [], "note": 3, "items": []}, _Lists) == ("note", "items")
    assert unread([], _Lists) == ()
