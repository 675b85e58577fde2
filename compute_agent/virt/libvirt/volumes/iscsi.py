# SPDX-License-Identifier: Apache-2.0
"""An iSCSI client that reads the size and serial of a logical unit, before any guest uses the unit.

Called by ``network_connectors``. The client logs in (RFC 7143, with CHAP if there is a password),
sends two commands and logs out. QEMU reads the data itself.

Invariant: each session has a new ISID, and therefore ends no session of QEMU. The password never
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
#: Values in answers: the login class for a redirection, SCSI statuses, and the sense key of a unit
#: that was reset.
ELSEWHERE, GOOD, CHECK_CONDITION, UNIT_ATTENTION = 1, 0, 2, 6
#: Seconds for each answer, bytes of an answer, and attempts for each command.
TIMEOUT_SECONDS, MAX_ANSWER_BYTES, ATTEMPTS = 10.0, 1 << 16, 4
MAX_LOGIN_STEPS, MAX_REDIRECTIONS = 8, 2
MD5 = "5"
#: The page of a unit's names, the kinds of names that are unique, and the prefix of a local NAA
#: name.
NAMES_PAGE, OF_THE_UNIT = 0x83, 0
NAA, EUI64, NAA_LOCAL = 3, 2, "3"
LONGEST_LUN, FLAT = 1 << 14, 0x4000


class UnitRefused(Exception):
    """The target refuses the login or a command. The text has the reason in terms of iSCSI."""


@dataclass(frozen=True, slots=True)
class UnitAddress:
    """The address of a logical unit, and the identity of this host.

    Attributes:
        host: Host of the portal.
        port: Port of the portal.
        name: iSCSI name of the target.
        lun: Number of the unit.
        initiator: This host's iSCSI name.
        user: User for CHAP, or "" for a target without CHAP.
        password: Password for CHAP.
    """

    host: str
    port: int
    name: str
    lun: int
    initiator: str
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Unit:
    """Size and serial of a unit. ``serial`` is its world-wide name, or "" without one."""

    size_bytes: int
    serial: str


def look_at(target: UnitAddress) -> Unit:
    """Log in, read size and serial of the unit, log out, and return size and serial.

    At most ``MAX_REDIRECTIONS`` redirections by the target are followed.

    Raises:
        UnitRefused: The target refuses the login or a command, or redirects too often.
        OSError, ValueError: The target is unreachable or does not speak iSCSI.
    """
    host, port = target.host, target.port
    for _ in range(MAX_REDIRECTIONS + 1):
        with closing(socket.create_connection((host, port), TIMEOUT_SECONDS)) as connection:
            session = _Session(connection, target)
            other_portal = session.log_in()
            if not other_portal:
                unit = Unit(session.size(), session.serial())
                session.log_out()
                return unit
        host, port = address(other_portal)
    raise UnitRefused(f"the target redirects this host more than {MAX_REDIRECTIONS} times")


def address(portal: str) -> tuple[str, int]:
    """Return host and port of a portal, for example "10.0.0.5:3260,1". The default port is 3260.

    IPv6 addresses are in brackets. The text after a comma, the portal group, is ignored.

    Raises:
        ValueError: The text is not a portal.
    """
    text = portal.partition(",")[0]
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    number = int(port or 3260)
    if not host or not 0 < number < 1 << 16:
        raise ValueError(f"{portal[:80]!r} is not an iSCSI portal")
    return host, number


class _Session:
    def __init__(self, connection: socket.socket, target: UnitAddress) -> None:
        self._connection, self._target = connection, target
        # 0x80 marks a random ISID.
        self._isid = b"\x80" + os.urandom(5)
        self._command, self._last_status, self._task = 1, 0, 0

    # --- login ---
    def log_in(self) -> str:
        """Log in, and return "". If the target redirects this host, return the other portal.

        Raises:
            UnitRefused: The target refuses the login, or the login takes too many steps.
            ValueError: The target does not speak iSCSI.
        """
        target = self._target
        credentials = {
            "InitiatorName": target.initiator,
            "TargetName": target.name,
            "SessionType": "Normal",
            "AuthMethod": "CHAP" if target.user else "None",
        }
        stage, fields = SECURITY, credentials
        for _ in range(MAX_LOGIN_STEPS):
            is_last = stage == OPERATIONAL or not target.user or "CHAP_R" in fields
            answer, flags = self._send_login(stage, fields, is_last)
            if "TargetAddress" in answer:
                return answer["TargetAddress"]
            if flags & FINAL:
                stage = flags & 3
                if stage == FULL:
                    return ""
                fields = {
                    "HeaderDigest": "None",
                    "DataDigest": "None",
                    "MaxRecvDataSegmentLength": str(MAX_ANSWER_BYTES),
                    "ErrorRecoveryLevel": "0",
                }
            else:
                fields = self._answer_challenge(answer) if stage == SECURITY else {}
        raise UnitRefused(f"the login does not end within {MAX_LOGIN_STEPS} steps")

    def _answer_challenge(self, answer: dict[str, str]) -> dict[str, str]:
        if answer.get("AuthMethod") == "CHAP":
            return {"CHAP_A": MD5}
        if "CHAP_C" not in answer:
            return {}
        if answer.get("CHAP_A") != MD5:
            raise UnitRefused("the target does not support CHAP with MD5")
        # Without an identifier this raises ValueError too.
        identifier = int(answer.get("CHAP_I", ""))
        challenge = _parse_challenge(answer["CHAP_C"])
        # CHAP requires MD5.
        proof = hashlib.md5(
            bytes([identifier & 0xFF]) + self._target.password.encode() + challenge,
            usedforsecurity=False,
        )
        return {"CHAP_N": self._target.user, "CHAP_R": f"0x{proof.hexdigest()}"}

    def _send_login(
        self, stage: int, fields: dict[str, str], is_last: bool
    ) -> tuple[dict[str, str], int]:
        next_stage = OPERATIONAL if stage == SECURITY else FULL
        flags = stage << 2 | (FINAL | next_stage if is_last else 0)
        text = "".join(f"{name}={value}\0" for name, value in fields.items()).encode()
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
        head, data = self._receive()
        if head[0] & 0x3F != LOGIN_ANSWER:
            raise ValueError("the target does not speak iSCSI")
        (status_number,) = struct.unpack(">I", head[24:28])
        self._last_status = (status_number + 1) & 0xFFFFFFFF
        pairs = (line.partition("=") for line in data.decode("utf-8", "replace").split("\0"))
        answer = {name: value for name, _, value in pairs if name}
        kind, detail = head[36], head[37]
        if kind not in (0, ELSEWHERE):
            raise UnitRefused(
                f"the target refuses the login: {_REFUSALS.get((kind, detail), 'status')} "
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
        self._receive()

    # --- questions ---
    def size(self) -> int:
        """Return the unit's size in bytes.

        Raises:
            UnitRefused: The unit reports an error.
            ValueError: The unit's answer is too short.
        """
        data = self._send_command(struct.pack(">BB8xIBB", 0x9E, 0x10, 32, 0, 0), 32)
        if len(data) < 12:
            raise ValueError(f"the target reports the size of the unit in {len(data)} bytes")
        last_block, block_bytes = struct.unpack(">QI", data[:12])
        return int((last_block + 1) * block_bytes)

    def serial(self) -> str:
        """Return the unit's ``world_wide_name``, or "" if the unit refuses to report names."""
        try:
            page = self._send_command(struct.pack(">BBBHB", 0x12, 1, NAMES_PAGE, 1024, 0), 1024)
        except UnitRefused:
            return ""
        return world_wide_name(page[4:])

    def _send_command(self, command: bytes, max_bytes: int) -> bytes:
        """Send a command and return the unit's data.

        A unit that was reset reports this first. Then the command is sent again, up to ``ATTEMPTS``
        times in total.

        Raises:
            UnitRefused: The unit answers with an error.
        """
        for _ in range(ATTEMPTS):
            data, status, sense = self._send_command_once(command, max_bytes)
            if status == GOOD:
                return data
            key = _read_sense_key(sense)
            if status != CHECK_CONDITION or key != UNIT_ATTENTION:
                break
        raise UnitRefused(
            f"unit {self._target.lun} of the target answers with status {status:#04x}, sense key {key}"
        )

    def _send_command_once(self, command: bytes, max_bytes: int) -> tuple[bytes, int, bytes]:
        self._task += 1
        head = struct.pack(
            ">BB6xHH4xIIII16s",
            COMMAND,
            FINAL | READS | SIMPLE,
            _encode_lun(self._target.lun),
            0,
            self._task,
            max_bytes,
            self._command,
            self._last_status,
            command,
        )
        self._command = (self._command + 1) & 0xFFFFFFFF
        self._send(head, b"")
        data = b""
        while True:
            head, piece = self._receive()
            kind = head[0] & 0x3F
            if kind in (DATA_IN, COMMAND_ANSWER):
                (status_number,) = struct.unpack(">I", head[24:28])
            if kind == DATA_IN:
                data += piece
                if len(data) > max_bytes:
                    raise ValueError("the target sends more data than requested")
                if head[1] & HAS_STATUS:
                    self._last_status = (status_number + 1) & 0xFFFFFFFF
                    return data, head[3], b""
            elif kind == COMMAND_ANSWER:
                self._last_status = (status_number + 1) & 0xFFFFFFFF
                return data, head[3], piece
            elif kind != PING:
                raise ValueError(f"the target answers with the unexpected operation {kind:#04x}")

    # --- bytes ---
    def _send(self, head: bytes, data: bytes) -> None:
        self._connection.sendall(head + data + b"\0" * (-len(data) % 4))

    def _receive(self) -> tuple[bytes, bytes]:
        head = self._receive_bytes(HEADER)
        length = int.from_bytes(head[5:8], "big")
        if length > MAX_ANSWER_BYTES:
            raise ValueError("the target does not speak iSCSI")
        self._receive_bytes(head[4] * 4)
        return head, self._receive_bytes(length + -length % 4)[:length]

    def _receive_bytes(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self._connection.recv(count - len(data))
            if not piece:
                raise ValueError("the target closed the connection")
            data += piece
        return data


_REFUSALS = {
    (2, 1): "wrong user or password",
    (2, 2): "this initiator is not permitted",
    (2, 3): "the target does not exist",
    (2, 4): "the target was removed",
    (3, 1): "the target is out of service",
}


def _encode_lun(number: int) -> int:
    """Return the first two bytes of the unit's address, by the SCSI Architecture Model.

    Raises:
        ValueError: The number is negative, or not below ``LONGEST_LUN``.
    """
    if not 0 <= number < LONGEST_LUN:
        raise ValueError(f"{number} is not a valid number of a unit")
    return number if number < 256 else FLAT | number


def _parse_challenge(text: str) -> bytes:
    prefix, digits = text[:2].lower(), text[2:]
    if prefix == "0x":
        return bytes.fromhex("0" * (len(digits) % 2) + digits)
    if prefix == "0b":
        return base64.b64decode(digits, validate=True)
    raise ValueError("the CHAP challenge is neither hexadecimal nor base64")


def _read_sense_key(data: bytes) -> int:
    """Return the sense key of SCSI sense data, or 0 if the data is too short.

    ``data`` begins with the length of the sense data in two bytes.
    """
    if len(data) < 5:
        return 0
    return (data[3] if data[2] & 0x7E == 0x72 else data[4]) & 0xF


def world_wide_name(names: bytes) -> str:
    """Return the unit's first NAA name, else the EUI-64 name, as hexadecimal text, or "".

    A locally assigned NAA name does not count, because another unit may get that name after the
    target's restart.

    Args:
        names: The list of names in page 0x83 of the unit.
    """
    names_by_kind: dict[int, str] = {}
    while len(names) >= 4:
        kind, length = names[1], names[3]
        name, names = names[4 : 4 + length], names[4 + length :]
        if kind >> 4 & 3 == OF_THE_UNIT and name:
            names_by_kind.setdefault(kind & 0xF, name.hex())
    registered = names_by_kind.get(NAA, "")
    if registered.startswith(NAA_LOCAL):
        registered = ""
    return registered or names_by_kind.get(EUI64, "")
