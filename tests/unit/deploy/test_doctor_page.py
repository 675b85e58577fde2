# SPDX-License-Identifier: Apache-2.0
"""docs/doctor.md: equal to the page that the table of findings generates."""

from __future__ import annotations

from pathlib import Path

from deploy.operator.doctor.kinds import KINDS
from deploy.site import doctor_page

PAGE = Path(__file__).resolve().parents[3] / "docs/doctor.md"


def test_doctor_page_equals_generated_page() -> None:
    assert PAGE.read_text() == doctor_page.page(), (
        "run: python -m deploy.site.doctor_page > docs/doctor.md"
    )


def test_doctor_page_has_row_for_every_finding_kind_with_cause_and_remedy() -> None:
    for kind in KINDS.values():
        assert f"| `{kind.name}` |" in doctor_page.page()
        assert kind.detects and kind.cause and kind.remedy
        assert KINDS.keys() >= set(kind.first)
