from pathlib import Path

import msgspec
import pytest

from shoal.protocol.errors import SpecError
from shoal.protocol.spec import RunSpec, TrainingSpec, decode_spec, encode_spec, load_spec


def test_a_spec_that_went_over_the_wire_is_the_same() -> None:
    spec = RunSpec(training=TrainingSpec(compensation="calibrated", s_max=2))
    assert decode_spec(encode_spec(spec)) == spec


def test_who_still_says_predict_is_told_in_one_line_what_to_say_instead(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\npredict = false\n")
    builtins = msgspec.to_builtins(RunSpec())
    builtins["training"]["predict"] = False
    for read in (lambda: load_spec(path), lambda: decode_spec(msgspec.msgpack.encode(builtins))):
        with pytest.raises(SpecError, match=r'unknown field `predict`.*"pipeoptim".*"stash" for false') as raised:
            read()
        assert "\n" not in str(raised.value)


def test_an_unknown_compensation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[training]\ncompensation = "hope"\n')
    with pytest.raises(SpecError, match=r"hope.*compensation"):
        load_spec(path)
