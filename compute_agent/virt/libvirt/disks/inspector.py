# SPDX-License-Identifier: Apache-2.0
"""Inspects images and disks, in a helper process without other rights (``compute_agent.sandbox``).

Called by ``inspection`` through the helper. The functions return plain values, which the agent
checks again, because an image could take over the helper.
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
#: Text of a VMDK descriptor, which can name other files. The library's inspector does not recognize
#: a descriptor that is padded with zeros.
DESCRIPTOR = re.compile(rb"disk descriptorfile|createtype\s*=", re.IGNORECASE)


def image(file: int, whole: bool) -> JsonObject:
    """Inspect an image.

    Args:
        file: Descriptor of the open file.
        whole: True if the file is complete, False to inspect only the beginning of an image.

    Returns:
        ``formats``: possible formats, sorted, or [] if more data is needed. ``unsafe``: the reason
        not to use a qcow2 image, or "". ``virtual_size``: for a qcow2 image the bytes that a guest
        would see, or 0 if unsafe. In all other cases the length of the file.
    """
    inspectors = format_inspector.InspectWrapper(cast("IO[bytes]", _read_pieces(file)))
    size, head = 0, b""
    for piece in inspectors:
        size += len(piece)
        head = head or piece
        if inspectors.formats is not None:
            break
    if whole:
        inspectors.close()
    formats = {str(match) for match in inspectors.formats or ()}
    if "raw" in formats and DESCRIPTOR.search(head):
        formats = {"vmdk"}
    report: JsonObject = {
        "formats": sorted(formats),
        "unsafe": "",
        "virtual_size": os.fstat(file).st_size,
    }
    if formats == {"qcow2"} and inspectors.format is not None:
        inspector = inspectors.format
        unsafe = _check_safety(inspector) or _check_qcow2(file, whole)
        report |= {"unsafe": unsafe, "virtual_size": 0 if unsafe else inspector.virtual_size}
    return report


def disk(file: int) -> JsonObject:
    """Inspect a server's complete qcow2 disk that another host sent.

    Args:
        file: Descriptor of the open file.

    Returns:
        ``unsafe``: the reason why QEMU may not open the disk, or "".
    """
    return {"unsafe": _check_qcow2(file, whole=True)}


def _read_pieces(file: int) -> Iterator[bytes]:
    """Yield the file's bytes. The first piece suffices to recognize most formats."""
    at, length = 0, FIRST_BYTES
    while piece := os.pread(file, length, at):
        yield piece
        at, length = at + len(piece), PIECE_BYTES


def _check_safety(inspector: format_inspector.FileInspector) -> str:
    try:
        inspector.safety_check()
    except format_inspector.SafetyCheckFailed as error:
        return "; ".join(str(reason) for reason in error.failures.values())
    return ""


def _check_qcow2(file: int, whole: bool) -> str:
    try:
        if whole:
            qcow2.check(file)
        else:
            qcow2.header(os.pread(file, qcow2.HEADER_BYTES, 0))
    except ValueError as problem:
        return str(problem)
    return ""
