# SPDX-License-Identifier: Apache-2.0
"""JSON as compact text: equal to the standard library's, also for values that orjson refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum

import pytest

from common.service.json_text import to_json


class Colour(StrEnum):
    RED = "red"


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True], "ü": '\u2028\x7f\x1f/"\\'},
        {"state": Colour.RED},
        {"number": 2**70},
        {7: "a key that is no text"},
        (1, 2),
    ],
)
def test_json_text_equals_compact_text_of_standard_library(value: object) -> None:
    expected = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    assert to_json(value).decode() == expected


def test_json_text_of_other_object_raises_type_error_and_of_half_pair_value_error() -> None:
    with pytest.raises(TypeError):
        to_json({"point": Point(1)})
    with pytest.raises(ValueError, match="surrogates not allowed"):
        to_json("\ud800")
