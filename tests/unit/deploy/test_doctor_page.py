# SPDX-License-Identifier: Apache-2.0
"""The page about the doctor is what its table says today, and each kind is told of."""

from __future__ import annotations

from pathlib import Path

from deploy.operator.doctor.kinds import KINDS
from deploy.site import doctor_page

PAGE = Path(__file__).resolve().parents[3] / "docs/doctor.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == doctor_page.page(), (
        "run: python -m deploy.site.doctor_page > docs/doctor.md"
    )


def test_every_kind_has_a_cause_and_a_remedy() -> None:
    for kind in KINDS.values():
        assert f"| `{kind.name}` |" in doctor_page.page()
        assert kind.detects and kind.cause and kind.remedy
        assert KINDS.keys() >= set(kind.first)
