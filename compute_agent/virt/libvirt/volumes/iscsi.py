# SPDX-License-Identifier: Apache-2.0
"""What an iSCSI target says of a logical unit: its size and its serial, before any guest sees it.

Called by ``network_connectors``. A client that logs in (RFC 7143, with CHAP where there is a
password), asks two questions and logs out; the data itself is QEMU's to read. Must stay true: a
session of ours has an ISID of its own each time, so that it ends no session of QEMU's; no password
leaves this process.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import struct
from contextlib import closing
from dataclasses import dataclass, field

LOGIN, COMMAND, LOGOUT = 0x03, 0x01, 0x06
LOGIN_ANSWER, COMMAND_ANSWER, DATA_IN, PING = 0x23, 0x21, 0x25, 0x20
IMMEDIATE, FINAL, READS, HAS_STATUS, SIMPLE = 0x40, 0x80, 0x40, 0x01, 0x01
SECURITY, OPERATIONAL, FULL = 0, 1, 3
HEADER = 48
#: Of an answer: the login's class "elsewhere"; SCSI's statuses; the sense of a fresh session.
ELSEWHERE, GOOD, CHECK_CONDITION, UNIT_ATTENTION = 1, 0, 2, 6
#: Seconds for each answer, the longest that is read, and how often a question is asked.
TIMEOUT_SECONDS, MAX_ANSWER_BYTES, ATTEMPTS = 10.0, 1 << 16, 4
MAX_LOGIN_STEPS, MAX_REDIRECTIONS = 8, 2
MD5 = "5"
#: The page of a unit's names, the kinds of them that are unique, and what begins one that is not.
NAMES_PAGE, OF_THE_UNIT = 0x83, 0
NAA, EUI64, NAA_LOCAL = 3, 2, "3"
LONGEST_LUN, FLAT = 1 << 14, 0x4000


class UnitRefused(Exception):
    """The target does not give the unit to this host; the text says why, in iSCSI's terms."""


@dataclass(frozen=True, slots=True)
class UnitAddress:
    """A logical unit: where it is, and who asks. ``user``: "" where the target asks for no name."""

    host: str
    port: int
    name: str
    lun: int
    initiator: str
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Unit:
    """What a unit says of itself; ``serial`` is its world-wide name, "" where it has none."""

    size_bytes: int
    serial: str


def look_at(target: UnitAddress) -> Unit:
    """Log in, ask, log out. Raises UnitRefused; OSError, ValueError: whatever is there does not
    answer as iSCSI does."""
    host, port = target.host, target.port
    for _ in range(MAX_REDIRECTIONS + 1):
        with closing(socket.create_connection((host, port), TIMEOUT_SECONDS)) as connection:
            session = _Session(connection, target)
            elsewhere = session.log_in()
            if not elsewhere:
                unit = Unit(session.size(), session.serial())
                session.log_out()
                return unit
        host, port = address(elsewhere)
    raise UnitRefused("it sends this host from one portal to the next")


def address(portal: str) -> tuple[str, int]:
    """Host and port of a portal, with 3260 where it names none; raises ValueError."""
    text = portal.partition(",")[0]
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    number = int(port or 3260)
    if not host or not 0 < number < 1 << 16:
        raise ValueError(f"{portal[:80]!r} is no portal")
    return host, number


class _Session:
    def __init__(self, connection: socket.socket, target: UnitAddress) -> None:
        self._connection, self._target = connection, target
        self._isid = b"\x80" + os.urandom(5)  # 0x80: a random one
        self._command, self._last_status, self._task = 1, 0, 0

    # --- login ---
    def log_in(self) -> str:
        """Where to log in instead; "" when this host is in."""
        target = self._target
        said = {
            "InitiatorName": target.initiator,
            "TargetName": target.name,
            "SessionType": "Normal",
            "AuthMethod": "CHAP" if target.user else "None",
        }
        stage, wanted = SECURITY, said
        for _ in range(MAX_LOGIN_STEPS):
            goes_on = stage == OPERATIONAL or not target.user or "CHAP_R" in wanted
            answer, flags = self._login(stage, wanted, goes_on)
            if "TargetAddress" in answer:
                return answer["TargetAddress"]
            if flags & FINAL:
                stage = flags & 3
                if stage == FULL:
                    return ""
                wanted = {
                    "HeaderDigest": "None",
                    "DataDigest": "None",
                    "MaxRecvDataSegmentLength": str(MAX_ANSWER_BYTES),
                    "ErrorRecoveryLevel": "0",
                }
            else:
                wanted = self._proof(answer) if stage == SECURITY else {}
        raise UnitRefused("its login does not end")

    def _proof(self, answer: dict[str, str]) -> dict[str, str]:
        if answer.get("AuthMethod") == "CHAP":
            return {"CHAP_A": MD5}
        if "CHAP_C" not in answer:
            return {}
        if answer.get("CHAP_A") != MD5:
            raise UnitRefused("its CHAP has no algorithm in common with this host's, which is MD5")
        number = int(answer["CHAP_I"])
        challenge = _challenge(answer["CHAP_C"])
        proof = hashlib.md5(
            bytes([number & 0xFF]) + self._target.password.encode() + challenge,
            usedforsecurity=False,  # the protocol's choice
        )
        return {"CHAP_N": self._target.user, "CHAP_R": f"0x{proof.hexdigest()}"}

    def _login(self, stage: int, said: dict[str, str], goes_on: bool) -> tuple[dict[str, str], int]:
        after = OPERATIONAL if stage == SECURITY else FULL
        flags = stage << 2 | (FINAL | after if goes_on else 0)
        text = "".join(f"{name}={value}\0" for name, value in said.items()).encode()
        head = struct.pack(
            ">BBBBI6sHIHHII16x",
            IMMEDIATE | LOGIN,
            flags,
            0,
            0,
            len(text),
            self._isid,
            0,
            self._task,
            0,
            0,
            self._command,
            self._last_status,
        )
        self._send(head, text)
        head, data = self._read()
        if head[0] & 0x3F != LOGIN_ANSWER:
            raise ValueError("it does not speak iSCSI")
        (status_number,) = struct.unpack(">I", head[24:28])
        self._last_status = (status_number + 1) & 0xFFFFFFFF
        pairs = (line.partition("=") for line in data.decode("utf-8", "replace").split("\0"))
        answer = {name: value for name, _, value in pairs if name}
        kind, detail = head[36], head[37]
        if kind not in (0, ELSEWHERE):
            raise UnitRefused(
                f"it refuses the login: {_REFUSALS.get((kind, detail), 'status')} "
                f"({kind:#04x}{detail:02x})"
            )
        return answer, head[1]

    def log_out(self) -> None:
        head = struct.pack(
            ">BB6x8xIHHII16x",
            IMMEDIATE | LOGOUT,
            FINAL,
            self._task,
            0,
            0,
            self._command,
            self._last_status,
        )
        self._send(head, b"")
        self._read()

    # --- questions ---
    def size(self) -> int:
        """Its bytes."""
        data = self._ask(struct.pack(">BB8xIBB", 0x9E, 0x10, 32, 0, 0), 32)
        last, block = struct.unpack(">QI", data[:12])
        return int((last + 1) * block)

    def serial(self) -> str:
        """By what the unit is known in the whole world; "" when it has no such name."""
        try:
            page = self._ask(struct.pack(">BBBHB", 0x12, 1, NAMES_PAGE, 1024, 0), 1024)
        except UnitRefused:
            return ""
        return world_wide_name(page[4:])

    def _ask(self, question: bytes, most: int) -> bytes:
        """What the unit answers; one that was reset says that first."""
        for _ in range(ATTEMPTS):
            data, status, sense = self._command_once(question, most)
            if status == GOOD:
                return data
            key = _sense_key(sense)
            if status != CHECK_CONDITION or key != UNIT_ATTENTION:
                break
        raise UnitRefused(
            f"its unit {self._target.lun} answers with status {status:#04x}, sense {key}"
        )

    def _command_once(self, question: bytes, most: int) -> tuple[bytes, int, bytes]:
        self._task += 1
        head = struct.pack(
            ">BB6xHH4xIIII16s",
            COMMAND,
            FINAL | READS | SIMPLE,
            _lun(self._target.lun),
            0,
            self._task,
            most,
            self._command,
            self._last_status,
            question,
        )
        self._command = (self._command + 1) & 0xFFFFFFFF
        self._send(head, b"")
        data = b""
        while True:
            head, piece = self._read()
            kind = head[0] & 0x3F
            if kind in (DATA_IN, COMMAND_ANSWER):
                (status_number,) = struct.unpack(">I", head[24:28])
            if kind == DATA_IN:
                data += piece
                if len(data) > most:
                    raise ValueError("it says more than it was asked")
                if head[1] & HAS_STATUS:
                    self._last_status = (status_number + 1) & 0xFFFFFFFF
                    return data, head[3], b""
            elif kind == COMMAND_ANSWER:
                self._last_status = (status_number + 1) & 0xFFFFFFFF
                return data, head[3], piece
            elif kind != PING:
                raise ValueError(f"it answers with operation {kind:#04x}")

    # --- bytes ---
    def _send(self, head: bytes, data: bytes) -> None:
        self._connection.sendall(head + data + b"\0" * (-len(data) % 4))

    def _read(self) -> tuple[bytes, bytes]:
        head = self._bytes(HEADER)
        length = int.from_bytes(head[5:8], "big")
        if length > MAX_ANSWER_BYTES:
            raise ValueError("it does not speak iSCSI")
        self._bytes(head[4] * 4)
        return head, self._bytes(length + -length % 4)[:length]

    def _bytes(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = self._connection.recv(count - len(found))
            if not piece:
                raise ValueError("it ended the connection")
            found += piece
        return found


_REFUSALS = {
    (2, 1): "user or password is not the one",
    (2, 2): "this initiator may not",
    (2, 3): "there is no such target",
    (2, 4): "the target was removed",
    (3, 1): "it is out of service",
}


def _lun(number: int) -> int:
    """As the first two bytes of SAM's address of a unit."""
    if not 0 <= number < LONGEST_LUN:
        raise ValueError(f"{number} is no number of a unit")
    return number if number < 256 else FLAT | number


def _challenge(text: str) -> bytes:
    how, digits = text[:2].lower(), text[2:]
    if how == "0x":
        return bytes.fromhex("0" * (len(digits) % 2) + digits)
    if how == "0b":
        return base64.b64decode(digits, validate=True)
    raise ValueError("its challenge is written in no way that iSCSI has")


def _sense_key(data: bytes) -> int:
    """Of sense data in either of its forms, behind its length."""
    if len(data) < 5:
        return 0
    return (data[3] if data[2] & 0x7E == 0x72 else data[4]) & 0xF


def world_wide_name(names: bytes) -> str:
    """Of the unit's names (page 0x83) the one that no other unit has; "" when there is none. One
    that the target assigns by itself is none: it is another's when the target begins anew."""
    found: dict[int, str] = {}
    while len(names) >= 4:
        kind, length = names[1], names[3]
        name, names = names[4 : 4 + length], names[4 + length :]
        if kind >> 4 & 3 == OF_THE_UNIT and name:
            found.setdefault(kind & 0xF, name.hex())
    registered = found.get(NAA, "")
    if registered.startswith(NAA_LOCAL):
        registered = ""
    return registered or found.get(EUI64, "")
