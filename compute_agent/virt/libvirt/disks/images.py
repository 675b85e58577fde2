# SPDX-License-Identifier: Apache-2.0
"""The image cache: each image is fetched once, verified, inspected, and named by checksum.

Called by ``virt.libvirt.driver``. An image is untrusted input. The received bytes are counted and
hashed. Helper processes inspect the beginning and then the complete file (``inspection``). If all
checks succeed, the file is renamed to a name with the checksum (``backing_files``). No other
program opens the file before that.

A server's folder has a hard link to the server's image. An image with a single link is therefore
unused and may be evicted. The access time of the file records the last request.

Invariant: a file in the cache without ``.part`` is complete, verified, independent of other files,
and never changed.
"""

from __future__ import annotations

import hashlib
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
from common.service.log import get_logger
from compute_agent.verb_context import Cancelled, ImageReader, ImageWriter, VerbContext, VerbFailed
from compute_agent.virt.download_limit import MAX_DOWNLOADS, DownloadLimit
from compute_agent.virt.libvirt.disks import backing_files, inspection
from compute_agent.virt.libvirt.disks.background_reads import LOOK_SECONDS, read_in_background

log = get_logger(__name__)
MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30
#: An image is inspected when this many bytes have arrived, before the rest is fetched.
FIRST_INSPECTED_BYTES = MEBIBYTE
#: Seconds after a request in which the image gets a link in a server's folder.
UNUSED_SECONDS = 600
#: Results of inspections in this process. A result holds for the content, wherever the file is.
INSPECTIONS = inspection.InspectionCache()


class ImageMissing(VerbFailed):
    """The image service does not have the image, or refuses access."""


@dataclass(frozen=True, slots=True)
class CachedImage:
    """A verified image in the cache. ``virtual_size`` is the size in bytes that the guest sees."""

    path: Path
    format: str
    virtual_size: int


class ImageCache:
    """The images of this host. Thread-safe.

    Args:
        folder: Folder of the cache, which no other host uses.
        ttl: Seconds for which an unused image stays.
        fetches: Limit of images fetched at the same time. 0: no limit.
    """

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
        """Return the verified image from the cache. A missing image is fetched first.

        Args:
            image: The image.
            max_bytes: Limit of the virtual size in bytes. 0: no limit.
            read_image: Opens the image at the image service, or at another host.
            context: Context of the verb.

        Raises:
            ImageMissing: The image service does not have the image, or refuses access.
            VerbFailed: The image cannot be fetched, stored or used, or exceeds ``max_bytes``.
            Cancelled: Within five seconds of the cancel, even if no byte arrives.
            Unavailable: The image service does not answer.
        """
        if image.disk_format not in inspection.FORMATS:
            raise VerbFailed(
                f"Images of format {image.disk_format!r} are not supported; "
                f"convert the image to one of {', '.join(inspection.FORMATS)}."
            )
        name = _cache_name(image)
        lock = self._locks[name]
        while not lock.acquire(timeout=LOOK_SECONDS):
            _stop_if_cancelled(context)
        try:
            path = self._find_cached(name, context)
            if path is None:
                with self._fetches.one(context):
                    context.phase(CommandPhase.FETCHING_IMAGE)
                    path = self._fetch(image, name, max_bytes, read_image, context)
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        finally:
            lock.release()
        size = _inspect_once(path, path.name, image.disk_format, max_bytes, context)
        return CachedImage(path, image.disk_format, size)

    def evict(self, now: float | None = None) -> list[str]:
        """Remove images that no server's folder links to, ``ttl`` seconds after the last request.

        An image stays for at least ``UNUSED_SECONDS``, and while a verb fetches it.

        Args:
            now: Time in seconds since the epoch. None: the present time.

        Returns:
            The names of the removed files.
        """
        now = time.time() if now is None else now
        evicted = []
        for path in self._folder.iterdir():
            status = path.lstat()
            lock = self._locks[path.name]
            used = max(status.st_atime, status.st_mtime)
            if (
                status.st_nlink == 1
                and now - used > max(self._ttl, UNUSED_SECONDS)
                and lock.acquire(blocking=False)
            ):
                try:
                    path.unlink()
                    evicted.append(path.name)
                finally:
                    lock.release()
        return evicted

    def _find_cached(self, name: str, context: VerbContext) -> Path | None:
        """Return the verified file of this cache name, or None if the cache has no such file.

        The name of an image id is a link, which is followed. A file that has changed or cannot be
        read is removed with a log entry, and counts as missing.

        Raises:
            Cancelled: The verb was cancelled while the file was read.
        """
        path = self._folder / name
        if path.is_symlink():
            path = self._folder / os.readlink(path)
        if not path.exists():
            return None
        try:
            backing_files.verify(path, context)
        except VerbFailed as error:
            log.error(
                "an image in the cache has changed since it was fetched, and is fetched again",
                details=error.details,
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
                closing(_read_image(image.id, read_image, context)) as chunks,
            ):
                for chunk in _check_length(image, chunks):
                    digest.update(chunk)
                    file.write(chunk)
                    if image.size:
                        context.phase(CommandPhase.FETCHING_IMAGE, 100 * file.tell() // image.size)
                    if file.tell() - len(chunk) < FIRST_INSPECTED_BYTES <= file.tell():
                        file.flush()
                        _check_virtual_size(
                            inspection.inspect_beginning(part, image.disk_format, context) or 0,
                            max_bytes,
                        )
                _check_digest(image, digest.hexdigest())
                file.flush()
                content = backing_files.content_name(
                    replace(image, hash_algo=digest.name, hash_value=digest.hexdigest())
                )
                _inspect_once(part, content, image.disk_format, max_bytes, context)
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            path = self._folder / content
            os.replace(part, path)
            backing_files.mark_verified(path)
            if path.name != name:
                _link_id(self._folder / name, path.name)
            return path
        except OSError as error:
            raise VerbFailed(
                "The host could not store the image.", retryable=True, details=f"{part}: {error}"
            ) from error
        finally:
            part.unlink(missing_ok=True)


def _inspect_once(
    path: Path, content: str, declared: str, max_bytes: int, context: VerbContext
) -> int:
    """Inspect a complete image, and return the virtual size in bytes.

    Content in ``INSPECTIONS``, which this process has accepted before, is not inspected again. The
    size is compared with ``max_bytes`` in both cases.

    Args:
        path: Path of the complete image.
        content: Name of the content, from ``backing_files.content_name``.
        declared: Format by the image service.
        max_bytes: Limit of the virtual size. 0: no limit.
        context: Context of the verb.

    Raises:
        VerbFailed: The image cannot be used, is larger than ``max_bytes``, or the inspection
            failed.
        Cancelled: The verb was cancelled during the inspection.
    """
    recorded_size = INSPECTIONS.get(content)
    size = (
        inspection.inspect_whole(path, declared, context)
        if recorded_size is None
        else recorded_size
    )
    _check_virtual_size(size, max_bytes)
    if recorded_size is None:
        inspection.require_opens(path, declared, context)
        INSPECTIONS.add(content, size)
    return size


def _link_id(name: Path, content: str) -> None:
    """Make ``name`` a symbolic link to the content, for an image without a known checksum."""
    part = name.with_name(f"{name.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(content)
    os.replace(part, name)


def _check_length(image: ImageRef, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the chunks. Raise VerbFailed if the image is longer or shorter than ``image.size``.

    With size 0 the length is not checked.
    """
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if image.size and size > image.size:
            raise VerbFailed(
                f"The image is longer than the {image.size} bytes that the image service announced."
            )
        yield chunk
    if image.size and size != image.size:
        raise VerbFailed(
            f"The download of the image ended after {size} of {image.size} bytes.", retryable=True
        )


def _check_digest(image: ImageRef, digest: str) -> None:
    if image.hash_value and digest != image.hash_value.lower():
        raise VerbFailed(
            f"The image does not have the {image.hash_algo} checksum that the image service reports; "
            "upload the image again.",
            details=f"image {image.id}: checksum {digest}, expected {image.hash_value}",
        )


def _check_virtual_size(virtual_size: int, max_bytes: int) -> None:
    if max_bytes and virtual_size > max_bytes:
        raise VerbFailed(
            f"The image's disk of {virtual_size / GIBIBYTE:.2f} GiB does not fit into the flavor's root "
            f"disk of {max_bytes / GIBIBYTE:.0f} GiB; use a larger flavor."
        )


def _read_image(
    image_id: str, read_image: ImageReader, context: VerbContext
) -> Generator[bytes, None, None]:
    """Yield the chunks of ``read_image``, and turn its errors into VerbFailed.

    NotFound and Forbidden become ImageMissing. Unavailable and Cancelled are raised unchanged.
    """
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
        raise kind(
            problem.text, details=f"image {image_id} cannot be read: {problem!r}"
        ) from problem
    except Exception as problem:
        raise VerbFailed(
            "The image could not be fetched from the image service.",
            retryable=True,
            details=f"image {image_id}: {type(problem).__name__}: {problem}",
        ) from problem


def _cache_name(image: ImageRef) -> str:
    """Return the name for the image in the cache.

    The name contains the checksum. Without a checksum from the image service, the name contains the
    image's id, and the file is a link to the content.

    Raises:
        VerbFailed: The image's id, format or checksum is not valid.
    """
    if not image.hash_value:
        if not re.fullmatch(r"[0-9a-fA-F-]{32,36}", image.id):
            raise VerbFailed("The image's id is not a UUID.", details=f"id {image.id!r}")
        return f"id-{image.id.lower()}.{image.disk_format}"
    return backing_files.content_name(image)


def _stop_if_cancelled(context: VerbContext) -> None:
    if context.cancelled():
        raise Cancelled


def upload(path: Path, write_image: ImageWriter, context: VerbContext) -> int:
    """Send the file to the image service, and return the number of bytes.

    The upload has a thread of its own, so that a cancelled verb does not wait for a writer that
    hangs.

    Raises:
        VerbFailed: The image service refuses the image, or the upload failed.
        Cancelled: The verb was cancelled. The thread stops at the next chunk.
        Unavailable: The image service does not answer.
    """
    box: queue.Queue[Exception | None] = queue.Queue()
    has_ended, size, sent = threading.Event(), path.stat().st_size, 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        with path.open("rb") as file:
            while chunk := file.read(MEBIBYTE):
                if has_ended.is_set():
                    raise Cancelled
                yield chunk
                sent += len(chunk)

    def push() -> None:
        try:
            write_image(chunks())
            box.put(None)
        # The verb's thread raises the exception.
        except Exception as error:  # noqa: BLE001
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
        has_ended.set()
    if error is None:
        context.phase(CommandPhase.UPLOADING, 100)
        return size
    if isinstance(error, (VerbFailed, Cancelled, errors.Unavailable)):
        raise error
    text = (
        error.text
        if isinstance(error, errors.Problem)
        else "The image service did not accept the image of the server."
    )
    raise VerbFailed(
        text, details=f"the upload failed with {type(error).__name__}: {error}"
    ) from error
