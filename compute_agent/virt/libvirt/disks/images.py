# SPDX-License-Identifier: Apache-2.0
"""The cache of images: each fetched once, verified, inspected, and named by its checksum.

Called by ``virt.libvirt.driver``. An image is hostile until proved otherwise: while its bytes
stream in they are counted and hashed, helpers inspect the beginning and then the whole
(``inspection``), and only when all agree does the file get its name, which is its checksum
(``backing_files``). Until then no other program opens it. A server's folder holds a hard link to
its image, so an image with one name only is not used by anybody and may be evicted; that it was
asked for is kept as its access time. Must stay true: a file in the cache without ``.part`` is
whole, verified, refers to no other file, and is never written again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from common.domain import errors
from common.domain.command_progress import CommandPhase
from common.domain.models import ImageRef
from compute_agent.verb_context import Cancelled, ImageReader, ImageWriter, VerbContext, VerbFailed
from compute_agent.virt.download_limit import MAX_DOWNLOADS, DownloadLimit
from compute_agent.virt.libvirt.disks import backing_files, inspection
from compute_agent.virt.libvirt.disks.background_reads import LOOK_SECONDS, read_in_background

log = logging.getLogger(__name__)
MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30
#: Of a longer image so much is inspected before the rest is fetched.
FIRST_INSPECTED_BYTES = MEBIBYTE
#: Seconds in which an image that was asked for gets its link in a server's folder.
UNUSED_SECONDS = 600
#: What this process has inspected; the same content has the same verdict wherever it is.
INSPECTIONS = inspection.InspectionCache()


class ImageMissing(VerbFailed):
    """The image service does not have the image, or does not give it away."""


@dataclass(frozen=True, slots=True)
class CachedImage:
    """A verified image in the cache; ``virtual_size`` in bytes is what the guest will see."""

    path: Path
    format: str
    virtual_size: int


class ImageCache:
    """``folder`` is this host's alone. ``ttl``: seconds that an image nobody uses stays.
    ``fetches``: images fetched at a time. Thread-safe."""

    def __init__(self, folder: Path, ttl: float = 24 * 3600, fetches: int = MAX_DOWNLOADS) -> None:
        self._folder = folder
        self._ttl = ttl
        self._fetches = DownloadLimit(fetches)
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        for stale in folder.glob("*.part"):
            stale.unlink()

    def fetch(
        self, image: ImageRef, max_bytes: int, read_image: ImageReader, context: VerbContext
    ) -> CachedImage:
        """The image, fetched unless it is here. ``max_bytes`` bounds its virtual size (0: no
        bound).

        VerbFailed says why it cannot be used; Cancelled within five seconds, even when no byte
        arrives; Unavailable when the image service is.
        """
        if image.disk_format not in inspection.FORMATS:
            raise VerbFailed(
                f"Images of format {image.disk_format!r} are not supported here; "
                f"convert it to one of {', '.join(inspection.FORMATS)}."
            )
        name = _key(image)
        lock = self._locks[name]
        while not lock.acquire(timeout=LOOK_SECONDS):
            _stop_if_cancelled(context)
        try:
            path = self._cached(name, context)
            if path is None:
                with self._fetches.one(context):
                    context.phase(CommandPhase.FETCHING_IMAGE)
                    path = self._fetch(image, name, max_bytes, read_image, context)
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        finally:
            lock.release()
        size = _inspected(path, path.name, image.disk_format, max_bytes, context)
        return CachedImage(path, image.disk_format, size)

    def evict(self, now: float | None = None) -> list[str]:
        """Remove what no server links to and was not asked for within the TTL; returns the
        names."""
        now = time.time() if now is None else now
        evicted = []
        for path in self._folder.iterdir():
            about = path.lstat()
            lock = self._locks[path.name]
            used = max(about.st_atime, about.st_mtime)
            if (
                about.st_nlink == 1
                and now - used > max(self._ttl, UNUSED_SECONDS)
                and lock.acquire(blocking=False)
            ):
                try:
                    path.unlink()
                    evicted.append(path.name)
                finally:
                    lock.release()
        return evicted

    def _cached(self, name: str, context: VerbContext) -> Path | None:
        """The file that is here under this name, or that an image's id leads to; one that was
        changed goes."""
        path = self._folder / name
        if path.is_symlink():
            path = self._folder / os.readlink(path)
        if not path.exists():
            return None
        try:
            backing_files.verify(path, context)
        except VerbFailed as changed:
            log.error(
                "an image in the cache is not what was fetched and is fetched again: %s",
                changed.details,
            )
            path.unlink()
            return None
        return path

    def _fetch(
        self,
        image: ImageRef,
        name: str,
        max_bytes: int,
        read_image: ImageReader,
        context: VerbContext,
    ) -> Path:
        if shutil.disk_usage(self._folder).free < image.size:
            raise VerbFailed(
                "The host has no space for the image.",
                retryable=True,
                details=f"{image.size} bytes needed in {self._folder}; free space or evict images",
            )
        part = self._folder / f"{name}.{os.getpid()}.part"
        digest = hashlib.new(image.hash_algo if image.hash_value else backing_files.OWN_HASH)
        try:
            with (
                part.open("wb") as file,
                closing(_fetched(image.id, read_image, context)) as chunks,
            ):
                for chunk in _checked(image, chunks):
                    digest.update(chunk)
                    file.write(chunk)
                    if image.size:
                        context.phase(CommandPhase.FETCHING_IMAGE, 100 * file.tell() // image.size)
                    if file.tell() - len(chunk) < FIRST_INSPECTED_BYTES <= file.tell():
                        file.flush()
                        _refuse_too_large(
                            inspection.begun(part, image.disk_format, context) or 0, max_bytes
                        )
                _refuse_altered(image, digest.hexdigest())
                file.flush()
                content = backing_files.content_name(
                    replace(image, hash_algo=digest.name, hash_value=digest.hexdigest())
                )
                _inspected(part, content, image.disk_format, max_bytes, context)
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            path = self._folder / content
            os.replace(part, path)
            backing_files.mark_verified(path)
            if path.name != name:
                _lead(self._folder / name, path.name)
            return path
        except OSError as error:
            raise VerbFailed(
                "The host could not store the image.", retryable=True, details=f"{part}: {error}"
            ) from error
        finally:
            part.unlink(missing_ok=True)


def _inspected(
    path: Path, content: str, declared: str, max_bytes: int, context: VerbContext
) -> int:
    """The virtual size of what is in this file; what was found good before is not read again."""
    known = INSPECTIONS.get(content)
    size = inspection.finished(path, declared, context) if known is None else known
    _refuse_too_large(size, max_bytes)
    if known is None:
        inspection.require_opens(path, declared, context)
        INSPECTIONS.add(content, size)
    return size


def _lead(name: Path, content: str) -> None:
    """From the name of an image whose checksum nobody knew to its content."""
    part = name.with_name(f"{name.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(content)
    os.replace(part, name)


def _checked(image: ImageRef, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Hand the chunks on; raise VerbFailed as soon as they are not as many as were promised."""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if image.size and size > image.size:
            raise VerbFailed(
                f"The image is longer than the {image.size} bytes that the image service announced."
            )
        yield chunk
    if image.size and size != image.size:
        raise VerbFailed(f"The image ended after {size} of {image.size} bytes.", retryable=True)


def _refuse_altered(image: ImageRef, found: str) -> None:
    if image.hash_value and found != image.hash_value.lower():
        raise VerbFailed(
            f"The image does not have the {image.hash_algo} checksum that the image service gave for it; "
            "upload it again.",
            details=f"found {found}, expected {image.hash_value}",
        )


def _refuse_too_large(virtual_size: int, max_bytes: int) -> None:
    if max_bytes and virtual_size > max_bytes:
        raise VerbFailed(
            f"The image's disk of {virtual_size / GIBIBYTE:.2f} GiB does not fit into the flavor's root "
            f"disk of {max_bytes / GIBIBYTE:.0f} GiB; take a larger flavor."
        )


def _fetched(
    image_id: str, read_image: ImageReader, context: VerbContext
) -> Generator[bytes, None, None]:
    """The reader's chunks, and its errors in a verb's words."""
    try:
        with closing(
            read_in_background(f"fetch-{image_id}", lambda: read_image(image_id), context)
        ) as chunks:
            yield from chunks
    except (VerbFailed, Cancelled, errors.Unavailable):
        raise
    except errors.Problem as problem:
        kind = (
            ImageMissing if isinstance(problem, (errors.NotFound, errors.Forbidden)) else VerbFailed
        )
        raise kind(problem.text, details=f"image {image_id}: {problem!r}") from problem
    except Exception as problem:
        raise VerbFailed(
            "The image could not be fetched from the image service.",
            retryable=True,
            details=f"image {image_id}: {type(problem).__name__}: {problem}",
        ) from problem


def _key(image: ImageRef) -> str:
    """The file's name in the cache: by checksum; when the image service has none, by id, which
    leads to the file."""
    if not image.hash_value:
        if not re.fullmatch(r"[0-9a-fA-F-]{32,36}", image.id):
            raise VerbFailed("The image's id is not a UUID.", details=f"id {image.id!r}")
        return f"id-{image.id.lower()}.{image.disk_format}"
    return backing_files.content_name(image)


def _stop_if_cancelled(context: VerbContext) -> None:
    if context.cancelled():
        raise Cancelled


def upload(path: Path, write_image: ImageWriter, context: VerbContext) -> int:
    """Hand the file's bytes to the image service; returns their number. A writer that hangs does
    not outlast a
    cancel: it has a thread of its own."""
    box: queue.Queue[Exception | None] = queue.Queue()
    left, size, sent = threading.Event(), path.stat().st_size, 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        with path.open("rb") as file:
            while chunk := file.read(MEBIBYTE):
                if left.is_set():
                    raise Cancelled
                yield chunk
                sent += len(chunk)

    def push() -> None:
        try:
            write_image(chunks())
            box.put(None)
        except Exception as error:  # noqa: BLE001 - told to the verb's thread, which raises it
            box.put(error)

    context.phase(CommandPhase.UPLOADING, 0)
    threading.Thread(target=push, name=f"upload-{path.parent.name}", daemon=True).start()
    try:
        while True:
            context.phase(CommandPhase.UPLOADING, 100 * sent // max(size, 1))
            _stop_if_cancelled(context)
            try:
                error = box.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                continue
            break
    finally:
        left.set()
    if error is None:
        context.phase(CommandPhase.UPLOADING, 100)
        return size
    if isinstance(error, (VerbFailed, Cancelled, errors.Unavailable)):
        raise error
    text = (
        error.text
        if isinstance(error, errors.Problem)
        else "The image service did not take the image."
    )
    raise VerbFailed(text, details=f"{type(error).__name__}: {error}") from error
