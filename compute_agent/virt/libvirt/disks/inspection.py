# SPDX-License-Identifier: Apache-2.0
"""Checks images, and disks received from other hosts, before any program opens them.

Called by ``images`` and ``disks``. A helper process reads the bytes (``inspector``). Then QEMU
itself opens a qcow2 image once, in another helper, because a guest could not start from an image
that QEMU cannot open. The answers of helpers are limited and checked.

Invariant: a failed check is the fault of the image and not retryable, so the conductor does not try
another host. Only a failure of the inspector itself is retryable.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path

from common.domain.json_types import JsonMapping, JsonObject, JsonValue
from compute_agent.sandbox import client
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.libvirt.disks import qemu_img

#: Declared format -> names of the inspector for its content. For example, a raw disk with a
#: partition table is "gpt".
FORMATS = {"qcow2": {"qcow2"}, "raw": {"raw", "gpt"}}
MAX_REASON_CHARS, MAX_VIRTUAL_BYTES = 500, 1 << 62
INSPECTION_TIMEOUT_SECONDS = 120.0
#: Advice for the user.
NEXT_STEP = "Make a new image with qemu-img convert -O qcow2, and upload the new image."
#: The refusal of a server's disk whose header is malformed or names an unexpected backing file.
UNSAFE_DISK = "The server's disk is malformed or has an unexpected backing file, so this host does not open the disk."


class InspectionCache:
    """Virtual sizes in bytes of accepted images, by the name of their content.

    The name contains the checksum. The cache keeps the last ``most`` sizes.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def get(self, content: str) -> int | None:
        return self._sizes.get(content)

    def add(self, content: str, size: int) -> None:
        self._sizes[content] = size
        while len(self._sizes) > self._most:
            self._sizes.popitem(last=False)


def inspect_beginning(part: Path, declared: str, context: VerbContext) -> int | None:
    """Inspect the beginning of an image. ``declared`` is the format by the image service.

    Returns:
        The virtual size in bytes, which is the length so far for a raw image. None if more data is
        needed.

    Raises:
        VerbFailed: The image cannot be used, or the inspection failed.
        Cancelled: The verb was cancelled.
    """
    report = _inspect("image", part, context, whole=False)
    return _check_size(report, declared) if report["formats"] else None


def inspect_whole(path: Path, declared: str, context: VerbContext) -> int:
    """Inspect a complete image, and return the virtual size in bytes.

    ``declared`` is the format by the image service.

    Raises:
        VerbFailed: The image cannot be used, or the inspection failed.
        Cancelled: The verb was cancelled.
    """
    return _check_size(_inspect("image", path, context, whole=True), declared)


def require_sound(disk: Path, context: VerbContext | None = None) -> None:
    """Check that a server's disk from another host is well-formed and refers to no other files.

    A backing file is permitted. The caller checks its name.

    Raises:
        VerbFailed: The disk is not acceptable, or the inspection failed.
        Cancelled: The verb was cancelled.
    """
    if reason := _inspect("disk", disk, context)["unsafe"]:
        raise VerbFailed(
            UNSAFE_DISK, details=f"{disk}: {reason}; find out which program wrote the disk"
        )


def _check_size(report: JsonMapping, declared: str) -> int:
    """Return the virtual size in bytes from the inspector's report.

    Raises:
        VerbFailed: The content does not have the declared format, or is unsafe.
    """
    names = report["formats"]
    if len(names) != 1 or names[0] not in FORMATS[declared]:
        raise VerbFailed(
            f"The image is declared as {declared} but its content is {' and '.join(names) or 'unknown'}. Upload the "
            "image again with its real format."
        )
    if report["unsafe"]:
        raise VerbFailed(f"The image is not safe to use: {report['unsafe']}. {NEXT_STEP}")
    return int(report["virtual_size"])


def require_opens(path: Path, declared: str, context: VerbContext) -> None:
    """Raise VerbFailed if QEMU cannot open the image. QEMU checks more than the inspector.

    A raw image is not checked. Without qemu-img the check is skipped.
    """
    if declared == "raw":
        return
    try:
        result = qemu_img.opens(path, declared, context)
    except FileNotFoundError:
        # qemu-img is not installed. Making the disk will report that.
        return
    if result.status != 0:
        raise VerbFailed(
            f"The image is damaged, and QEMU cannot open it. {NEXT_STEP}",
            details=f"{path}: qemu-img {result.reason}",
        )


def _inspect(
    function: str, path: Path, context: VerbContext | None, **arguments: bool
) -> JsonObject:
    """Call a function of ``inspector`` in a helper process, and return the checked report.

    Raises:
        VerbFailed: The helper exceeded a limit, failed, or returned an invalid report.
        Cancelled: The verb was cancelled.
        OSError: The file cannot be opened, or no helper can be started.
    """
    helpers = client.helpers()
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        result = helpers.call(
            f"compute_agent.virt.libvirt.disks.inspector:{function}",
            [file],
            helpers.limits(seconds=INSPECTION_TIMEOUT_SECONDS),
            context,
            **arguments,
        )
    finally:
        os.close(file)
    if result.status < 0 or result.why:
        raise VerbFailed(
            f"The inspection of the image exceeded its limits or crashed. {NEXT_STEP}",
            details=f"{path}: the inspector {result.reason}",
        )
    try:
        if result.status != 0:
            raise ValueError(result.reason)
        return check_report(json.loads(result.output))
    except (ValueError, TypeError, KeyError) as problem:
        raise VerbFailed(
            "The host could not inspect the image.", details=f"{path}: {problem}", retryable=True
        ) from problem


def check_report(report: JsonValue) -> JsonObject:
    """Check the inspector's report, and return ``formats``, ``unsafe`` and ``virtual_size``.

    Missing formats become [], and a missing size 0. The reason ``unsafe`` is cut to
    ``MAX_REASON_CHARS``, with "?" in place of characters that are not printable.

    Raises:
        ValueError: The report is not an object, or a value is not valid.
        KeyError: ``unsafe`` is missing.
    """
    if not isinstance(report, dict):
        raise ValueError("the inspector's report is no object")
    formats, reason, size = (
        report.get("formats", []),
        report["unsafe"],
        report.get("virtual_size", 0),
    )
    if not (
        isinstance(reason, str)
        and isinstance(size, int)
        and 0 <= size < MAX_VIRTUAL_BYTES
        and isinstance(formats, list)
        and all(isinstance(name, str) and name.isalnum() and len(name) < 16 for name in formats)
    ):
        raise ValueError("the inspector's report is not valid")
    printable_reason = "".join(
        letter if letter.isprintable() else "?" for letter in reason[:MAX_REASON_CHARS]
    )
    return {"formats": formats, "unsafe": printable_reason, "virtual_size": size}
