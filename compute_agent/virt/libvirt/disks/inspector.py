# SPDX-License-Identifier: Apache-2.0
"""What an image is, read from its bytes. Runs in a helper process that may do nothing else
(``compute_agent.sandbox``).

Called by ``inspection``, in the helper. Returns plain values, which the agent does not trust
either.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import IO, cast

from oslo_utils.imageutils import format_inspector

from common.domain.json_types import JsonObject
from compute_agent.virt.libvirt.disks import qcow2

FIRST_BYTES, PIECE_BYTES = 64 << 10, 1 << 20
#: A VMDK descriptor, which is text that names other files; the inspector overlooks one padded with
#: zeros.
DESCRIPTOR = re.compile(rb"disk descriptorfile|createtype\s*=", re.IGNORECASE)


def image(file: int, whole: bool) -> JsonObject:
    """formats: what the content may be, sorted; empty: not known yet. unsafe: why nobody may use it
    as what it is.
    virtual_size: bytes that a guest would see. ``whole``: the file will not grow."""
    inspectors = format_inspector.InspectWrapper(cast("IO[bytes]", _pieces(file)))
    size, head = 0, b""
    for piece in inspectors:
        size += len(piece)
        head = head or piece
        if inspectors.formats is not None:
            break
    if whole:
        inspectors.close()
    found = {str(match) for match in inspectors.formats or ()}
    if "raw" in found and DESCRIPTOR.search(head):
        found = {"vmdk"}
    report: JsonObject = {
        "formats": sorted(found),
        "unsafe": "",
        "virtual_size": os.fstat(file).st_size,
    }
    if found == {"qcow2"} and inspectors.format is not None:
        inspector = inspectors.format
        unsafe = _unsafe(inspector) or _malformed(file, whole)
        report |= {"unsafe": unsafe, "virtual_size": 0 if unsafe else inspector.virtual_size}
    return report


def disk(file: int) -> JsonObject:
    """unsafe: why a server's own disk, which another host sent, is not one that QEMU may open."""
    return {"unsafe": _malformed(file, whole=True)}


def _pieces(file: int) -> Iterator[bytes]:
    """The bytes of the file; first what most formats need."""
    at, length = 0, FIRST_BYTES
    while piece := os.pread(file, length, at):
        yield piece
        at, length = at + len(piece), PIECE_BYTES


def _unsafe(inspector: format_inspector.FileInspector) -> str:
    try:
        inspector.safety_check()
    except format_inspector.SafetyCheckFailed as failed:
        return "; ".join(str(reason) for reason in failed.failures.values())
    return ""


def _malformed(file: int, whole: bool) -> str:
    try:
        if whole:
            qcow2.check(file)
        else:
            qcow2.header(os.pread(file, qcow2.HEADER_BYTES, 0))
    except ValueError as problem:
        return str(problem)
    return ""
