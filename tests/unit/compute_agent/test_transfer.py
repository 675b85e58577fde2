# SPDX-License-Identifier: Apache-2.0
"""Files that travel from agent to agent: who may read which, and that what arrives is what was
sent."""

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
    whole,
)
from tests.waiting import await_true

CONTENT = os.urandom(3 * MEBIBYTE + 12345)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path / "files")
    (made.files.path / "disk").write_bytes(CONTENT)
    (made.files.path / "config").write_bytes(b"drive")
    yield made
    made.service.close()


def test_files_arrive_as_they_are(rig: Rig) -> None:
    assert rig.peer().parts() == [Part("config", 5, 5), Part("disk", len(CONTENT), len(CONTENT))]
    assert whole(rig.peer(), "disk", len(CONTENT)) == CONTENT
    assert whole(rig.peer(), "config", 5) == b"drive"


def test_empty_file_arrives(rig: Rig) -> None:
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
def test_nobody_reads_without_the_servers_own_secret(rig: Rig, server: str, secret: str) -> None:
    for ask in (lambda peer: peer.parts(), lambda peer: list(peer.read("disk"))):
        with pytest.raises(VerbFailed) as failed:
            ask(rig.peer(secret, server))
        assert "Nothing was offered" in failed.value.details
        assert SECRET not in failed.value.details
    assert rig.files.reads == []


@pytest.mark.parametrize(
    "name", ["../files/disk", "./disk", "/etc/passwd", "disk/", "disk\0", "DISK", "..", "dis"]
)
def test_only_names_on_the_list_are_files(rig: Rig, name: str) -> None:
    with pytest.raises(VerbFailed) as failed:
        list(rig.peer().read(name))
    assert "no such file" in failed.value.details
    assert rig.files.reads == []


@pytest.mark.parametrize(
    "told",
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
def test_what_is_no_request_is_refused_at_once(rig: Rig, told: bytes) -> None:
    with rig.connect() as connection:
        connection.sendall(told)
        answer = frames.Frames(connection).receive()
        assert answer.kind == frames.FAILURE
        assert json.loads(answer.data)["kind"] == "refused"
        with pytest.raises(frames.TransferInterrupted):
            frames.Frames(connection).receive()
    assert whole(rig.peer(), "config", 5) == b"drive"


def test_strangers_that_say_nothing_hold_up_nobody(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "files", strangers=2, request_seconds=1.0)
    (rig.files.path / "disk").write_bytes(CONTENT)
    with rig.connect() as silent, rig.connect() as slow:
        slow.sendall(b"\0")
        rig.peer().parts()  # it takes the place of the oldest
        assert silent.recv(1) == b""
        assert whole(rig.peer(silence_timeout=5.0), "disk", len(CONTENT)) == CONTENT
        assert slow.recv(1) == b""
    rig.service.close()


def test_reader_that_takes_nothing_is_cut_off_and_makes_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "files", readers=1, frame_seconds=1.0)
    (rig.files.path / "disk").write_bytes(bytes(range(256)) * (64 << 12))
    with rig.connect() as lazy:
        frames.send_request(lazy, frames.TransferRequest(SERVER, SECRET, "disk"))
        await_true(lambda: rig.files.reads)
        with pytest.raises(errors.Unavailable, match="too many"):
            list(rig.peer().read("disk"))
        assert sum(len(data) for _, data in rig.peer(silence_timeout=10.0).read("disk")) == 64 << 20
    rig.service.close()


def test_bad_byte_on_the_way_is_noticed_before_it_is_given(rig: Rig) -> None:
    def meddle(number: int, so_far: int, piece: bytes) -> bytes:
        at = 2 * MEBIBYTE - so_far
        return (
            piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :] if 0 <= at < len(piece) else piece
        )

    meddler = Meddler(rig.port, meddle)
    got = b""
    with pytest.raises(VerbFailed, match="safely") as failed:
        for _, data in client.peer(meddler.address, SERVER, SECRET).read("disk"):
            got += data
    assert failed.value.retryable and "checksum" in failed.value.details
    assert got and CONTENT.startswith(got)
    meddler.close()


def test_lost_connection_goes_on_where_it_was(rig: Rig) -> None:
    sent = []

    def meddle(number: int, so_far: int, piece: bytes) -> bytes | None:
        sent.append(len(piece))
        return None if number <= 2 and so_far + len(piece) > 1.5 * MEBIBYTE else piece

    meddler = Meddler(rig.port, meddle)
    assert (
        whole(
            client.peer(meddler.address, SERVER, SECRET, silence_timeout=10.0), "disk", len(CONTENT)
        )
        == CONTENT
    )
    assert meddler.connections == 3
    assert sum(sent) < 2 * len(CONTENT)
    meddler.close()


def test_service_that_came_back_is_asked_for_the_rest(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "files", rate=1)
    (rig.files.path / "disk").write_bytes(CONTENT)
    read = rig.peer(silence_timeout=10.0).read("disk")
    got = [next(read)]
    rig.service.close()
    again = service.TransferService(rig.files, "127.0.0.1", rig.port)
    again.start()
    got += list(read)
    assert b"".join(sparse.filled(len(CONTENT), got)) == CONTENT
    again.close()


def test_service_that_is_gone_is_unavailable_after_the_timeout(rig: Rig) -> None:
    rig.service.close()
    began = time.monotonic()
    with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1"):
        rig.peer(silence_timeout=1.0).parts()
    assert 0.9 < time.monotonic() - began < 5


def test_service_that_is_silent_is_unavailable_not_waited_for_without_end(
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
def test_host_without_an_address_for_transfers_has_none(address: str) -> None:
    with pytest.raises(VerbFailed, match="does not give them"):
        client.peer(address, SERVER, SECRET)


def test_ten_gib_of_hole_cost_nothing(rig: Rig, tmp_path: Path) -> None:
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
        sum(piece.length for piece in stored) == part.bytes == list(sparse.proved(copy, stored))[-1]
    )
    assert time.monotonic() - began < 5
    assert copy.stat().st_size == size and copy.stat().st_blocks * 512 < MEBIBYTE
    assert list(sparse.pieces(copy, size)) == list(sparse.pieces(disk, size))


def test_bytes_that_the_disk_did_not_keep_are_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    stored = sparse.write(copy, 3 * MEBIBYTE, iter([(0, b"one"), (2 * MEBIBYTE, b"two")]))
    assert list(sparse.proved(copy, stored)) == [3, 6]
    with copy.open("r+b") as file:
        file.seek(2 * MEBIBYTE)
        file.write(b"tow")
    with pytest.raises(ValueError, match=f"3 bytes at {2 * MEBIBYTE} are not what was written"):
        list(sparse.proved(copy, stored))


@pytest.mark.parametrize("readers", [1, 3])
def test_rate_is_of_all_readers_together(tmp_path: Path, readers: int) -> None:
    rig = Rig(tmp_path / "files", rate=2)
    (rig.files.path / "disk").write_bytes(CONTENT)
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.append(len(whole(rig.peer(), "disk", len(CONTENT)))))
        for _ in range(readers)
    ]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [len(CONTENT)] * readers
    # The last piece of each that pays is already on its way while the next would wait.
    assert time.monotonic() - began > (readers * len(CONTENT) / MEBIBYTE - 1) / 2 - 0.1
    rig.service.close()


def test_what_the_driver_says_while_it_reads_reaches_the_reader(rig: Rig) -> None:
    class Started(Folder):
        def read_part(self, server: str, secret: str, name: str) -> Iterator[tuple[int, bytes]]:
            yield 0, b"x"
            raise errors.Forbidden("The server was started.")

    files = Started(rig.files.path)
    other = service.TransferService(files, "127.0.0.1")
    read = client.peer(other.start(), SERVER, SECRET).read("disk")
    assert next(read) == (0, b"x")
    with pytest.raises(VerbFailed) as failed:
        next(read)
    assert "was started" in failed.value.details
    other.close()


def test_what_nobody_foresaw_is_not_told_to_others(rig: Rig) -> None:
    class Faulty(Folder):
        def parts(self, server: str, secret: str) -> list[Part]:
            raise RuntimeError(f"told {secret}")

    other = service.TransferService(Faulty(rig.files.path), "127.0.0.1")
    with pytest.raises(VerbFailed) as failed:
        client.peer(other.start(), SERVER, SECRET).parts()
    assert SECRET not in failed.value.details and "its log" in failed.value.details
    other.close()


@pytest.mark.parametrize(
    "told",
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
def test_list_that_is_none_is_noticed(told: bytes) -> None:
    with pytest.raises(VerbFailed, match="safely"):
        answered(told).parts()


def answered(told: bytes) -> Peer:
    """A peer whose service answers one request with this list."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            frames.receive_request(connection)
            frames.Frames(connection).send(frames.LIST, data=told)

    threading.Thread(target=serve, daemon=True).start()
    return client.peer(f"127.0.0.1:{listener.getsockname()[1]}", SERVER, SECRET)


def test_secret_is_not_shown() -> None:
    assert SECRET not in repr(frames.TransferRequest(SERVER, SECRET))
