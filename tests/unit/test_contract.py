"""The contract: what is refused, what is only recorded, and what survives JSON."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from eyas.capture.contract import REMEDIES, Contract
from eyas.errors import UserError

CONTRACT = Contract(
    format=1,
    model_digest="model",
    tokenizer_digest="tokenizer",
    template_digest="template",
    layers=(2, 15, 27),
    last_is_normed=True,
    dtype="bfloat16",
    hidden_size=576,
    vocab_size=49152,
    engine="inprocess",
    engine_version="5.24.0",
    flags={"device": "cpu"},
)
OTHERS: dict[str, Any] = {
    "format": 2,
    "model_digest": "other",
    "tokenizer_digest": "other",
    "template_digest": "other",
    "layers": (3, 16, 28),
    "last_is_normed": False,
    "hidden_size": 577,
    "vocab_size": 49153,
    "dtype": "float32",
    "engine": "sglang",
    "engine_version": "0.5",
    "flags": {},
}


def test_every_field_is_tried_here() -> None:
    assert {field.name for field in fields(Contract)} == OTHERS.keys()


@pytest.mark.parametrize("name", REMEDIES)
def test_what_means_other_tensors_is_refused(name: str) -> None:
    other = replace(CONTRACT, **{name: OTHERS[name]})
    with pytest.raises(UserError) as error:
        CONTRACT.require_equal(other, "runs/x/store")
    line = str(error.value)
    assert line == (
        f"runs/x/store: captured with {name} {getattr(CONTRACT, name)!r}, needed is {OTHERS[name]!r}: {REMEDIES[name]}"
    )
    assert "\n" not in line


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - REMEDIES.keys()))
def test_what_means_other_rounding_is_recorded_only(name: str) -> None:
    other = replace(CONTRACT, **{name: OTHERS[name]})
    assert other != CONTRACT
    CONTRACT.require_equal(other, "x")


def test_round_trip() -> None:
    assert Contract.from_dict(json.loads(json.dumps(CONTRACT.to_dict())), "x") == CONTRACT


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "not a mapping"),
        ({k: v for k, v in CONTRACT.to_dict().items() if k != "layers"}, "lacks layers"),
        ({**CONTRACT.to_dict(), "later": 1}, "has an unknown field later"),
        ({**CONTRACT.to_dict(), "layers": [2, 15]}, r"layers of the capture contract are \[2, 15\]"),
        ({**CONTRACT.to_dict(), "layers": "default"}, "layers of the capture contract is 'default'"),
        ({**CONTRACT.to_dict(), "last_is_normed": 1}, "last_is_normed of the capture contract is 1"),
        ({**CONTRACT.to_dict(), "hidden_size": True}, "hidden_size of the capture contract is True"),
    ],
)
def test_damaged(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"manifest: .*{message}"):
        Contract.from_dict(data, "manifest")
