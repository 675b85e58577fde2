# SPDX-License-Identifier: Apache-2.0
"""The helper that connects volumes to the host's kernel, and its client in the agent.

    python -m compute_agent.privileged.volume_helper  # kilonova-volumes.service; systemd opens the
    socket

The helper runs os-brick with rights that the agent lacks. Request and response are one JSON object
each. The verbs are ``host`` (connector properties of this host), ``connect`` and ``disconnect``. A
connected volume is available at ``DEVICES``/ID, independent of the kernel's name.

Invariant: of the volume service's data only the keys of ``SHAPES`` are passed on, and each value
must match its pattern. Why: os-brick builds arguments of root's programs and file names from them.

This module imports no other part of the project.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LOG = logging.getLogger(__name__)
Question = Mapping[str, object]

SOCKET = Path("/run/kilonova-volumes.socket")
DEVICES, STATE = Path("/dev/kilonova"), Path("/run/kilonova-volumes")
#: The first descriptor that systemd passes (sd_listen_fds).
SYSTEMD_DESCRIPTOR = 3
#: Limits: bytes of a message, seconds for a request, and seconds for a response. os-brick may log
#: in to several portals and wait for each.
MOST_BYTES, SAY_SECONDS, ANSWER_SECONDS = 64 << 10, 5.0, 300.0
SCAN_ATTEMPTS = 5
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: Prefix of a name that a target assigned itself: the digit for NAA, and NAA type 3. Such a name
#: is not unique worldwide.
NO_WORLD_WIDE_NAME = "33"

TARGET, PORTAL = (
    r"\w[\w.:-]{0,222}",
    r"(?:\w[\w.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):\d{1,5}(?:,\d+)?",
)
HOST, NUMBER, WWN = r"\w[\w.:-]{0,252}", r"\d{1,10}", r"[0-9A-Fa-f:]{16,23}"
WORD, PASSWORD = r"[\w.:@/][\w.:@/-]{0,254}", r"[\x21-\x2c\x2e-\x7e][\x20-\x7e]{0,254}"
#: Protocol -> key of the connection -> pattern of its value, or of each of its values.
SHAPES: Mapping[str, Mapping[str, str]] = {
    "iscsi": {
        "target_portal": PORTAL,
        "target_iqn": TARGET,
        "target_lun": NUMBER,
        "target_portals": PORTAL,
        "target_iqns": TARGET,
        "target_luns": NUMBER,
        "target_discovered": "True|False",
        "enforce_multipath": "True|False",
        "addressing_mode": WORD,
        "auth_method": "CHAP",
        "auth_username": WORD,
        "auth_password": PASSWORD,
        "discovery_auth_method": "CHAP",
        "discovery_auth_username": WORD,
        "discovery_auth_password": PASSWORD,
    },
    "fibre_channel": {
        "target_wwn": WWN,
        "target_lun": NUMBER,
        "target_wwns": WWN,
        "target_luns": NUMBER,
        "target_discovered": "True|False",
        "enforce_multipath": "True|False",
        "addressing_mode": WORD,
        "initiator_target_map": WWN,
        "initiator_target_lun_map": WWN,
    },
    "nvmeof": {
        "nqn": TARGET,
        "target_nqn": TARGET,
        "target_portal": HOST,
        "target_port": NUMBER,
        "transport_type": "tcp|rdma|RoCEv2|FC|fc|NVMe-TCP",
        "portals": HOST,
        "vol_uuid": "[0-9A-Fa-f-]{32,36}",
        "volume_nguid": "[0-9A-Fa-f-]{32,36}",
        "ns_id": NUMBER,
        "host_nqn": TARGET,
    },
}


class NotDone(Exception):
    """The helper refused or failed. The text contains the reason."""


# --- The agent's side ---
class VolumeHelper:
    """The agent's client of the helper."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = path

    def ask(self, question: Question) -> dict[str, object]:
        """Send a request to the helper and return the response. ``Brick.answer`` describes both.

        Raises:
            NotDone: The helper refuses, fails, or ends before the response is complete.
            OSError: The helper cannot be reached, or is silent for ``ANSWER_SECONDS``.
        """
        with socket.socket(socket.AF_UNIX) as helper:
            helper.settimeout(ANSWER_SECONDS)
            helper.connect(str(self._path))
            helper.sendall(json.dumps(dict(question)).encode())
            helper.shutdown(socket.SHUT_WR)
            try:
                response = dict(json.loads(_read(helper)))
            except ValueError as problem:
                raise NotDone(
                    "the volume helper ended before its response was complete; see the log of kilonova-volumes"
                ) from problem
        if "error" in response:
            raise NotDone(str(response["error"]))
        return response


# --- The helper's side ---
class Brick:
    """os-brick in this process.

    Args:
        devices: Folder for the links to connected volumes.
        state: Folder for the device info of each volume until ``disconnect``.
        execute: Replaces os-brick's function that runs programs, in tests.
    """

    def __init__(
        self,
        devices: Path = DEVICES,
        state: Path = STATE,
        execute: Callable[..., tuple[str, str]] | None = None,
    ) -> None:
        from os_brick import privileged
        from os_brick.initiator import connector
        from oslo_config import cfg

        # os-brick must not delegate work to a privileged process, because this process is one.
        for context in (privileged.default, privileged.brick_privsep_hide_output):
            context.set_client_mode(False)
        cfg.CONF.set_override("lock_path", str(state), "os_brick")
        self._library, self._execute = connector, execute
        self._devices, self._state = devices, state
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def answer(self, question: Question) -> dict[str, object]:
        """Carry out a request and return the response.

        Args:
            question: ``verb`` is ``host``, ``connect`` or ``disconnect``. ``multipath`` is
                optional. ``host`` takes ``ip`` and ``host``. The other verbs take ``volume`` (an
                id), ``protocol`` and ``data``. ``connect`` also takes ``at_least``, the size in
                bytes that a volume must have after it has grown.

        Returns:
            For ``host`` the connector properties, for ``connect`` size_bytes and serial, for
            ``disconnect`` an empty object, also if the volume is not connected.

        Raises:
            NotDone: The request is invalid or failed. In the text, ``***`` replaces the passwords
                of the request.
        """
        verb = question.get("verb")
        try:
            if verb == "host":
                return self._host(question)
            if verb not in ("connect", "disconnect"):
                raise NotDone(f"the volume helper has no verb {verb!s:.20}")
            volume, protocol, data = parse_request(question)
            with self._lock_of(volume):
                if verb == "connect":
                    return self._connect(volume, protocol, data, question)
                self._disconnect(volume, protocol, data, question)
                return {}
        except NotDone:
            raise
        except Exception as problem:  # noqa: BLE001 - os-brick's, its libraries', the kernel's
            text = f"{type(problem).__name__}: {problem}"
            raise NotDone(without_passwords(text, question)[:1000]) from None

    def _lock_of(self, volume: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(volume, threading.Lock())

    def _host(self, question: Question) -> dict[str, object]:
        multipath = question.get("multipath") is True
        properties = self._library.get_connector_properties(
            None,
            str(question.get("ip") or ""),
            multipath,
            enforce_multipath=multipath,
            host=str(question.get("host") or ""),
            execute=self._execute,
        )
        return {name: value for name, value in dict(properties).items() if value is not None}

    def _connector(self, protocol: str, question: Question) -> Any:  # noqa: ANN401 - os-brick declares no types
        more = {"execute": self._execute} if self._execute is not None else {}
        return self._library.InitiatorConnector.factory(
            protocol,
            None,
            use_multipath=question.get("multipath") is True,
            device_scan_attempts=SCAN_ATTEMPTS,
            **more,
        )

    def _connect(
        self, volume: str, protocol: str, data: dict[str, object], question: Question
    ) -> dict[str, object]:
        connector = self._connector(protocol, question)
        # A file exists from here on, so that ``disconnect`` also cleans up a half made connection.
        self._write_info(volume, self._read_info(volume))
        info = dict(connector.connect_volume(dict(data)))
        path = os.fsdecode(info["path"])
        info["path"] = path
        self._write_info(volume, info)
        size = _size(path)
        if size < int(str(question.get("at_least") or 0)):
            # The volume has grown since the first connect.
            connector.extend_volume(dict(data))
            size = _size(path)
        self._link(volume, os.path.realpath(path))
        return {"size_bytes": size, "serial": _serial(info)}

    def _disconnect(
        self, volume: str, protocol: str, data: dict[str, object], question: Question
    ) -> None:
        info = self._read_info(volume)
        if info is None:
            return
        # ``force`` ignores a failed flush. No data is lost, because QEMU writes to the device
        # without a cache of this host.
        self._connector(protocol, question).disconnect_volume(dict(data), info, force=True)
        (self._devices / volume).unlink(missing_ok=True)
        self._file(volume).unlink(missing_ok=True)

    def _link(self, volume: str, path: str) -> None:
        self._devices.mkdir(mode=0o755, exist_ok=True)
        part = self._devices / f"{volume}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(path)
        part.replace(self._devices / volume)

    # --- Device info of connected volumes ---
    def _file(self, volume: str) -> Path:
        return self._state / f"{volume}.json"

    def _read_info(self, volume: str) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._file(volume).read_text()))
        except FileNotFoundError:
            return None

    def _write_info(self, volume: str, info: Mapping[str, Any] | None) -> None:
        part = self._file(volume).with_suffix(".part")
        part.write_text(json.dumps(dict(info or {})))
        part.replace(self._file(volume))


def parse_request(question: Question) -> tuple[str, str, dict[str, object]]:
    """Return the volume's id, the protocol, and the entries of the data that ``SHAPES`` permits.

    Other entries, and entries with the value None, are left out.

    Raises:
        NotDone: Id or protocol are invalid, the data is no object, a value does not match its
            pattern, or no permitted entry is left.
    """
    volume, protocol, data = (question.get(name) for name in ("volume", "protocol", "data"))
    if not isinstance(volume, str) or not ID.fullmatch(volume):
        raise NotDone(f"the volume's id {volume!r:.50} is not a UUID")
    shapes = SHAPES.get(str(protocol))
    if shapes is None or not isinstance(data, Mapping):
        raise NotDone(
            f"the volume helper does not connect volumes by {protocol!s:.40}, or the connection's data is not an object"
        )
    permitted_data: dict[str, object] = {}
    for name, shape in shapes.items():
        value = data.get(name)
        if value is None:
            continue
        if not all(re.fullmatch(shape, text, re.ASCII) for text in _texts(value)):
            raise NotDone(f"the value of {name} is not valid for {protocol}")
        permitted_data[name] = value
    if not permitted_data:
        raise NotDone(f"the connection contains no data that {protocol} needs")
    return volume, str(protocol), permitted_data


def without_passwords(text: str, question: Question) -> str:
    """Return ``text`` with ``***`` in place of the passwords of the request's data.

    A password is the value of a key that ends in "password". Its characters may be escaped in
    ``text``, because texts of errors contain the repr of other texts.
    """
    data = question.get("data")
    for name, value in data.items() if isinstance(data, Mapping) else ():
        if name.endswith("password") and value:
            escaped = str(value).replace("\\", "\\\\")
            for quoted in (
                escaped.replace("'", "\\'"),
                escaped.replace('"', '\\"'),
                escaped,
                str(value),
            ):
                text = text.replace(quoted, "***")
    return text


def _texts(value: object) -> list[str]:
    """Return all scalars in a JSON value as texts, including the keys of objects."""
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [str(value)]


def _size(path: str) -> int:
    with open(path, "rb") as device:
        return device.seek(0, os.SEEK_END)


def _serial(info: Mapping[str, Any]) -> str:
    """Return a connected device's worldwide name, from os-brick's device info or sysfs.

    The result is "" if no name can be read, or if the target assigned the name itself.
    """
    serial = str(info.get("scsi_wwn") or "")
    if not serial:
        name = os.path.basename(os.path.realpath(str(info["path"])))
        with contextlib.suppress(OSError):
            serial = Path("/sys/class/block", name, "wwid").read_text().strip()
    return "" if serial.startswith(NO_WORLD_WIDE_NAME) else serial


def serve(where: socket.socket, brick: Brick) -> None:
    """Answer each caller at the listening socket in a thread, until the process ends.

    The response is that of ``brick.answer``, or an object with the reason as ``error``.
    """
    while True:
        caller, _ = where.accept()
        threading.Thread(target=_serve_one, args=(caller, brick), daemon=True).start()


def _serve_one(caller: socket.socket, brick: Brick) -> None:
    with caller, contextlib.suppress(OSError):
        caller.settimeout(SAY_SECONDS)
        try:
            question = json.loads(_read(caller))
            response = brick.answer(question if isinstance(question, dict) else {})
        except (NotDone, ValueError) as problem:
            LOG.warning("%s", problem)
            response = {"error": str(problem)}
        caller.sendall(json.dumps(response).encode())


def _read(connection: socket.socket) -> bytes:
    """Read until the other side ends, or until more than ``MOST_BYTES`` have arrived.

    The result has at most twice as many bytes.
    """
    data = b""
    while len(data) <= MOST_BYTES and (piece := connection.recv(MOST_BYTES)):
        data += piece
    return data


def main() -> int:
    """Serve the socket that systemd passes. Without a socket, exit with an error."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        sys.exit(
            "systemd passed no socket to this process: run systemctl start kilonova-volumes.socket"
        )
    serve(socket.socket(fileno=SYSTEMD_DESCRIPTOR), Brick())
    return 0


if __name__ == "__main__":
    sys.exit(main())
