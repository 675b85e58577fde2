# SPDX-License-Identifier: Apache-2.0
"""Inspection of foreign disks: the check of a helper's report, and refusal of malformed disks."""

from __future__ import annotations

from pathlib import Path

import pytest

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.disks import inspection

GOOD = {"formats": ["raw"], "unsafe": "", "virtual_size": 5}


@pytest.mark.parametrize(
    "changes",
    [
        {"virtual_size": -1},
        {"virtual_size": inspection.MAX_VIRTUAL_BYTES},
        {"virtual_size": "5"},
        {"formats": "raw"},
        {"formats": ["../raw"]},
        {"formats": ["r" * 16]},
        {"unsafe": None},
    ],
    ids=str,
)
def test_inspection_report_is_refused_when_malformed(changes: dict[str, object]) -> None:
    assert inspection.check_report(dict(GOOD)) == GOOD
    with pytest.raises(ValueError):
        inspection.check_report({**GOOD, **changes})


def test_inspection_report_is_refused_when_it_is_no_object() -> None:
    with pytest.raises(ValueError, match="no object"):
        inspection.check_report([])


@pytest.mark.parametrize(
    "content", [b"no disk at all", b"QFI\xfb" + b"\xff" * 200], ids=["text", "header"]
)
def test_require_sound_refuses_malformed_disk(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "disk"
    path.write_bytes(content)
    with pytest.raises(VerbFailed, match="this host does not open"):
        inspection.require_sound(path)
