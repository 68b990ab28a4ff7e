import msgspec
import pytest

from shoal.protocol.messages import Advert, FetchStatus


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nb", "a\x00b", "a\u202eb"])
def test_a_member_whose_name_would_act_on_a_terminal_is_refused(name: str) -> None:
    claims = {"device": "cpu", "flop_per_s": 1.0, "memory_bytes": 1, "upload_bytes_per_s": 1.0, "addresses": ()}
    claims |= {"download_bytes_per_s": 1.0, "has_data": True}
    assert msgspec.convert(claims | {"name": "Zoë 👩\u200d🚀"}, Advert).name == "Zoë 👩\u200d🚀"
    with pytest.raises(msgspec.ValidationError, match="name has a control character"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(claims | {"name": name}), type=Advert)


@pytest.mark.parametrize("bad", [{"left_bytes": -1}, {"total_bytes": -1}, {"left_s": -1}, {"sources": ["a"] * 9}])
def test_a_fetch_with_impossible_numbers_is_refused(bad: dict[str, object]) -> None:
    assert msgspec.convert({"what": "state", "left_s": 2, "sources": ["a"] * 8}, FetchStatus).left_s == 2
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"what": "state"} | bad, FetchStatus)
