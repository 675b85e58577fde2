# SPDX-License-Identifier: Apache-2.0
"""What a helper says of foreign bytes is checked, and a disk that is malformed is opened by
nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from compute_agent.verb_context import VerbFailed
from compute_agent.virt.libvirt.disks import inspection

GOOD = {"formats": ["raw"], "unsafe": "", "virtual_size": 5}


@pytest.mark.parametrize(
    "said",
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
def test_an_answer_that_is_none_is_refused(said: dict[str, object]) -> None:
    assert inspection.check_report(dict(GOOD)) == GOOD
    with pytest.raises(ValueError):
        inspection.check_report({**GOOD, **said})


@pytest.mark.parametrize(
    "content", [b"no disk at all", b"QFI\xfb" + b"\xff" * 200], ids=["text", "header"]
)
def test_a_disk_that_is_malformed_is_opened_by_nobody(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "disk"
    path.write_bytes(content)
    with pytest.raises(VerbFailed, match="not one that this host may open"):
        inspection.require_sound(path)
