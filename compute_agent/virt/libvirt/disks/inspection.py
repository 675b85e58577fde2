# SPDX-License-Identifier: Apache-2.0
"""Whether an image, or a disk from another host, may be used: asked of helpers, before any program
opens it.

Called by ``images`` and ``disks``. A helper reads the bytes (``inspector``); then QEMU's own
reader, in another helper, opens a qcow2 image once, because what it cannot open no guest starts
from. What helpers answer is bounded and checked. Must stay true: what is refused here is the
image's fault and no host's, so nobody tries it on another host.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path

from common.domain.json_types import JsonMapping, JsonObject
from compute_agent.sandbox import client
from compute_agent.verb_context import VerbContext, VerbFailed
from compute_agent.virt.libvirt.disks import qemu_img

#: Declared format -> what the inspector may call its content (a partitioned raw disk is "gpt" to
#: it).
FORMATS = {"qcow2": {"qcow2"}, "raw": {"raw", "gpt"}}
MAX_REASON_CHARS, MAX_VIRTUAL_BYTES = 500, 1 << 62
INSPECTION_TIMEOUT_SECONDS = 120.0
#: What a user can do about it.
NEXT_STEP = "make it anew with: qemu-img convert -O qcow2"


class InspectionCache:
    """Virtual sizes of content that was found good in this process, by its name, which is its
    checksum."""

    def __init__(self, most: int = 1024) -> None:
        self._most = most
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def get(self, content: str) -> int | None:
        return self._sizes.get(content)

    def add(self, content: str, size: int) -> None:
        self._sizes[content] = size
        while len(self._sizes) > self._most:
            self._sizes.popitem(last=False)


def begun(part: Path, declared: str, context: VerbContext) -> int | None:
    """The virtual size that an image of which the beginning is here says; None: not known yet.
    VerbFailed says why it cannot be used."""
    report = _inspect("image", part, context, whole=False)
    return _accepted_size(report, declared) if report["formats"] else None


def finished(path: Path, declared: str, context: VerbContext) -> int:
    """The virtual size of an image that is here. VerbFailed says why it cannot be used."""
    return _accepted_size(_inspect("image", path, context, whole=True), declared)


def require_sound(disk: Path, context: VerbContext | None = None) -> None:
    """VerbFailed when a server's own disk, which came from another host, is malformed."""
    if reason := _inspect("disk", disk, context)["unsafe"]:
        raise VerbFailed(
            "The server's disk is not one that this host may open.",
            details=f"{disk}: {reason}; see what wrote it",
        )


def _accepted_size(report: JsonMapping, declared: str) -> int:
    """The content is what was declared, only that, and refers to nothing outside itself."""
    names = report["formats"]
    if len(names) != 1 or names[0] not in FORMATS[declared]:
        raise VerbFailed(
            f"The image is declared as {declared} but its content is {' and '.join(names) or 'unknown'}."
        )
    if report["unsafe"]:
        raise VerbFailed(
            f"The image is not safe to use: {report['unsafe']}; {NEXT_STEP}, and upload it again."
        )
    return int(report["virtual_size"])


def require_opens(path: Path, declared: str, context: VerbContext) -> None:
    """VerbFailed when QEMU's own reader, which knows more than ours, does not open the image."""
    if declared == "raw":
        return
    try:
        ended = qemu_img.opens(path, declared, context)
    except FileNotFoundError:
        return  # there is no qemu-img, and disks say so
    if ended.status != 0:
        raise VerbFailed(
            f"The image is damaged: no guest could start from it; {NEXT_STEP}, and upload it again.",
            details=f"{path}: qemu-img {ended.reason}",
        )


def _inspect(
    function: str, path: Path, context: VerbContext | None, **arguments: bool
) -> JsonObject:
    """What a helper says of a file, as far as it can be believed."""
    helpers = client.helpers()
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        ended = helpers.call(
            f"compute_agent.virt.libvirt.disks.inspector:{function}",
            [file],
            helpers.limits(seconds=INSPECTION_TIMEOUT_SECONDS),
            context,
            **arguments,
        )
    finally:
        os.close(file)
    if ended.status < 0 or ended.why:
        raise VerbFailed(
            f"The image could not be inspected within its limits; {NEXT_STEP}, and upload it again.",
            details=f"{path}: the inspector {ended.reason}",
        )
    try:
        if ended.status != 0:
            raise ValueError(ended.reason)
        return check_report(json.loads(ended.output))
    except (ValueError, TypeError, KeyError) as problem:
        raise VerbFailed(
            "The image could not be inspected.", details=f"{path}: {problem}", retryable=True
        ) from problem


def check_report(report: JsonObject) -> JsonObject:
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
        and all(isinstance(one, str) and one.isalnum() and len(one) < 16 for one in formats)
    ):
        raise ValueError("the inspector's answer is not one")
    said = "".join(letter if letter.isprintable() else "?" for letter in reason[:MAX_REASON_CHARS])
    return {"formats": formats, "unsafe": said, "virtual_size": size}
