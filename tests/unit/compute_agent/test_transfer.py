# SPDX-License-Identifier: Apache-2.0
"""Transfers between agents over real sockets: permission, integrity, resumption, limits."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.domain import errors
from compute_agent.transfer import client, frames, service, sparse
from compute_agent.verb_context import Part, Peer, VerbFailed
from tests.unit.compute_agent.transfer_rig import (
    MEBIBYTE,
    SECRET,
    SERVER,
    Folder,
    Meddler,
    Rig,
    read_whole,
)
from tests.waiting import await_true

CONTENT = os.urandom(3 * MEBIBYTE + 12345)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    new_rig = Rig(tmp_path / "files")
    (new_rig.files.path / "disk").write_bytes(CONTENT)
    (new_rig.files.path / "config").write_bytes(b"drive")
    yield new_rig
    new_rig.service.close()


def test_transfer_delivers_files_unchanged(rig: Rig) -> None:
    assert rig.peer().parts() == [Part("config", 5, 5), Part("disk", len(CONTENT), len(CONTENT))]
    assert read_whole(rig.peer(), "disk", len(CONTENT)) == CONTENT
    assert read_whole(rig.peer(), "config", 5) == b"drive"


def test_transfer_delivers_empty_file(rig: Rig) -> None:
    (rig.files.path / "nothing").touch()
    assert list(rig.peer().read("nothing")) == []


@pytest.mark.parametrize(
    ("server", "secret"),
    [
        (SERVER, "wrong"),
        (SERVER, ""),
        (SERVER, SECRET + "x"),
        (SERVER, "\N{SNOWMAN}" * 40),
        ("9a1f9e5c-0c4b-4d53-9f1e-2f5f6f0a7b11", SECRET),
        ("", SECRET),
        ("../" + SERVER, SECRET),
    ],
)
def test_transfer_refuses_wrong_server_or_secret(rig: Rig, server: str, secret: str) -> None:
    for request in (lambda peer: peer.parts(), lambda peer: list(peer.read("disk"))):
        with pytest.raises(VerbFailed) as failed:
            request(rig.peer(secret, server))
        assert "Nothing was offered" in failed.value.details
        assert SECRET not in failed.value.details
    assert rig.files.reads == []


@pytest.mark.parametrize(
    "name", ["../files/disk", "./disk", "/etc/passwd", "disk/", "disk\0", "DISK", "..", "dis"]
)
def test_transfer_refuses_unlisted_file_name(rig: Rig, name: str) -> None:
    with pytest.raises(VerbFailed) as failed:
        list(rig.peer().read(name))
    assert "offers no file" in failed.value.details
    assert rig.files.reads == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 5000) + b"x" * 5000,
        struct.pack("!I", 1 << 31),
        *(
            struct.pack("!I", len(text)) + text
            for text in (
                b"[]",
                b"{",
                b"\xff\xff",
                b"[" * 4000,
                json.dumps({"server": 1, "secret": "x"}).encode(),
                json.dumps({"server": SERVER, "secret": SECRET, "start": -1}).encode(),
                json.dumps({"server": SERVER, "secret": SECRET, "start": True}).encode(),
                json.dumps({"server": SERVER, "secret": SECRET, "version": 2}).encode(),
                json.dumps({"server": SERVER, "secret": SECRET, "path": "/etc/passwd"}).encode(),
            )
        ),
    ],
)
def test_transfer_refuses_malformed_request_at_once(rig: Rig, data: bytes) -> None:
    with rig.connect() as connection:
        connection.sendall(data)
        answer = frames.Frames(connection).receive()
        assert answer.kind == frames.FAILURE
        assert json.loads(answer.data)["kind"] == "refused"
        with pytest.raises(frames.TransferInterrupted):
            frames.Frames(connection).receive()
    assert read_whole(rig.peer(), "config", 5) == b"drive"


def test_silent_connections_do_not_block_transfers(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "files", strangers=2, request_seconds=1.0)
    (rig.files.path / "disk").write_bytes(CONTENT)
    with rig.connect() as silent, rig.connect() as slow:
        slow.sendall(b"\0")
        rig.peer().parts()  # takes the place of the oldest connection
        assert silent.recv(1) == b""
        assert read_whole(rig.peer(silence_timeout=5.0), "disk", len(CONTENT)) == CONTENT
        assert slow.recv(1) == b""
    rig.service.close()


def test_transfer_closes_stalled_reader_and_serves_next(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "files", readers=1, frame_seconds=1.0)
    (rig.files.path / "disk").write_bytes(bytes(range(256)) * (64 << 12))
    with rig.connect() as lazy:
        frames.send_request(lazy, frames.TransferRequest(SERVER, SECRET, "disk"))
        await_true(lambda: rig.files.reads)
        with pytest.raises(errors.Unavailable, match="too many"):
            list(rig.peer().read("disk"))
        assert sum(len(data) for _, data in rig.peer(silence_timeout=10.0).read("disk")) == 64 << 20
    rig.service.close()


def test_transfer_detects_corrupt_byte_before_returning_it(rig: Rig) -> None:
    def meddle(number: int, so_far: int, piece: bytes) -> bytes:
        at = 2 * MEBIBYTE - so_far
        return (
            piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :] if 0 <= at < len(piece) else piece
        )

    meddler = Meddler(rig.port, meddle)
    received = b""
    with pytest.raises(VerbFailed, match="copied intact") as failed:
        for _, data in client.peer(meddler.address, SERVER, SECRET).read("disk"):
            received += data
    assert failed.value.retryable and "checksum" in failed.value.details
    assert received and CONTENT.startswith(received)
    meddler.close()


def test_transfer_resumes_at_offset_after_lost_connection(rig: Rig) -> None:
    sizes = []

    def meddle(number: int, so_far: int, piece: bytes) -> bytes | None:
        sizes.append(len(piece))
        return None if number <= 2 and so_far + len(piece) > 1.5 * MEBIBYTE else piece

    meddler = Meddler(rig.port, meddle)
    assert (
        read_whole(
            client.peer(meddler.address, SERVER, SECRET, silence_timeout=10.0), "disk", len(CONTENT)
        )
        == CONTENT
    )
    assert meddler.connections == 3
    assert sum(sizes) < 2 * len(CONTENT)
    meddler.close()


def test_transfer_resumes_after_service_restart(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "files", rate=1)
    (rig.files.path / "disk").write_bytes(CONTENT)
    read = rig.peer(silence_timeout=10.0).read("disk")
    received = [next(read)]
    rig.service.close()
    restarted = service.TransferService(rig.files, "127.0.0.1", rig.port)
    restarted.start()
    received += list(read)
    assert b"".join(sparse.fill_holes(len(CONTENT), received)) == CONTENT
    restarted.close()


def test_transfer_raises_unavailable_after_timeout_when_service_is_down(rig: Rig) -> None:
    rig.service.close()
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1"):
        rig.peer(silence_timeout=1.0).parts()
    assert 0.9 < time.monotonic() - began < 5


def test_transfer_raises_unavailable_when_service_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, mute:
        silent = client.peer(
            f"127.0.0.1:{mute.getsockname()[1]}",
            SERVER,
            SECRET,
            silence_timeout=0.0,
            frame_seconds=1.0,
        )
        with pytest.raises(errors.Unavailable):
            silent.parts()


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:http", "127.0.0.1:١"]
)
def test_transfer_client_refuses_malformed_address_of_source_host(address: str) -> None:
    with pytest.raises(VerbFailed, match="does not serve"):
        client.peer(address, SERVER, SECRET)


def test_transfer_of_sparse_file_sends_only_data(rig: Rig, tmp_path: Path) -> None:
    disk, copy, size = rig.files.path / "sparse", tmp_path / "copy", 10 << 30
    with disk.open("wb") as file:
        for at in (0, 5 << 30, size - 4096):
            file.seek(at)
            file.write(b"data" * 1024)
    part = next(part for part in rig.peer().parts() if part.name == "sparse")
    assert part.size == size and 3 * 4096 <= part.bytes < MEBIBYTE
    began = time.monotonic()
    stored = sparse.write(copy, size, rig.peer().read("sparse"))
    assert (
        sum(piece.length for piece in stored) == part.bytes == list(sparse.verify(copy, stored))[-1]
    )
    assert time.monotonic() - began < 5
    assert copy.stat().st_size == size and copy.stat().st_blocks * 512 < MEBIBYTE
    assert list(sparse.pieces(copy, size)) == list(sparse.pieces(disk, size))


def test_sparse_verify_raises_when_bytes_on_disk_differ(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    stored = sparse.write(copy, 3 * MEBIBYTE, iter([(0, b"one"), (2 * MEBIBYTE, b"two")]))
    assert list(sparse.verify(copy, stored)) == [3, 6]
    with copy.open("r+b") as file:
        file.seek(2 * MEBIBYTE)
        file.write(b"tow")
    with pytest.raises(
        ValueError, match=f"other data than was written: 3 bytes at offset {2 * MEBIBYTE}"
    ):
        list(sparse.verify(copy, stored))


@pytest.mark.parametrize("readers", [1, 3])
def test_transfer_rate_is_shared_by_all_readers(tmp_path: Path, readers: int) -> None:
    rig = Rig(tmp_path / "files", rate=2)
    (rig.files.path / "disk").write_bytes(CONTENT)
    sizes: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: sizes.append(len(read_whole(rig.peer(), "disk", len(CONTENT))))
        )
        for _ in range(readers)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes == [len(CONTENT)] * readers
    # The last piece of each reader is already sent when the next one would wait.
    assert time.monotonic() - began > (readers * len(CONTENT) / MEBIBYTE - 1) / 2 - 0.1
    rig.service.close()


def test_transfer_reader_gets_error_of_driver_during_read(rig: Rig) -> None:
    class FailingFolder(Folder):
        def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
            yield 0, b"x"
            raise errors.Forbidden("The server was started.")

    files = FailingFolder(rig.files.path)
    other = service.TransferService(files, "127.0.0.1")
    read = client.peer(other.start(), SERVER, SECRET).read("disk")
    assert next(read) == (0, b"x")
    with pytest.raises(VerbFailed) as failed:
        next(read)
    assert "was started" in failed.value.details
    other.close()


def test_transfer_hides_unexpected_error_from_reading_host(rig: Rig) -> None:
    class Faulty(Folder):
        def parts(self, server: str, secret: str) -> list[Part]:
            raise RuntimeError(f"told {secret}")

    other = service.TransferService(Faulty(rig.files.path), "127.0.0.1")
    with pytest.raises(VerbFailed) as failed:
        client.peer(other.start(), SERVER, SECRET).parts()
    assert SECRET not in failed.value.details and "its log" in failed.value.details
    other.close()


@pytest.mark.parametrize(
    "file_list",
    [
        b"{}",
        b"[1]",
        b'[{"name": 1, "size": 1, "bytes": 1}]',
        b"\xff",
        b'[{"name": "disk", "size": -1, "bytes": 1}]',
        b'[{"name": "disk"}]',
        b"[" * 5000,
    ],
)
def test_transfer_client_refuses_malformed_file_list_of_source_host(file_list: bytes) -> None:
    with pytest.raises(VerbFailed, match="copied intact"):
        new_peer_with_list(file_list).parts()


def new_peer_with_list(file_list: bytes) -> Peer:
    """Return a peer whose service answers one request with this file list."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            frames.receive_request(connection)
            frames.Frames(connection).send(frames.LIST, data=file_list)

    threading.Thread(target=serve, daemon=True).start()
    return client.peer(f"127.0.0.1:{listener.getsockname()[1]}", SERVER, SECRET)


def test_transfer_request_repr_hides_secret() -> None:
    assert SECRET not in repr(frames.TransferRequest(SERVER, SECRET))
