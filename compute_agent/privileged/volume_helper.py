# SPDX-License-Identifier: Apache-2.0
"""Volumes that the host's kernel reaches: connected by os-brick in a process that may do so, for
the agent, which may not.

    python -m compute_agent.privileged.volume_helper  # kilonova-volumes.service; systemd opens the
    socket

A question is one object of JSON, and so is the answer. Its verbs: ``host`` (who this host is to the
volume service), ``connect`` and ``disconnect``. What is connected is found as ``DEVICES``/ID,
whatever name the kernel gave it. Must stay true: of what the volume service says only the keys of
``SHAPES`` pass, each made of the characters that it has, because os-brick makes arguments of root's
programs and names of files from them. It imports nothing of ours.
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
SYSTEMD_DESCRIPTOR = 3  # the first that systemd passes (sd_listen_fds)
#: A caller says its question at once; os-brick may log in to several portals and wait for each.
MOST_BYTES, SAY_SECONDS, ANSWER_SECONDS = 64 << 10, 5.0, 300.0
SCAN_ATTEMPTS = 5
ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: What a target assigns by itself: NAA 3, behind the digit that says NAA; another's some day.
NO_WORLD_WIDE_NAME = "33"

TARGET, PORTAL = (
    r"\w[\w.:-]{0,222}",
    r"(?:\w[\w.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):\d{1,5}(?:,\d+)?",
)
HOST, NUMBER, WWN = r"\w[\w.:-]{0,252}", r"\d{1,10}", r"[0-9A-Fa-f:]{16,23}"
WORD, PASSWORD = r"[\w.:@/][\w.:@/-]{0,254}", r"[\x21-\x2c\x2e-\x7e][\x20-\x7e]{0,254}"
#: Of each protocol: key -> what its value, or each of its values, looks like.
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
    """The helper did not do it; the text says why."""


# --- the agent's side ---
class VolumeHelper:
    """The helper, as the agent sees it."""

    def __init__(self, path: Path = SOCKET) -> None:
        self._path = path

    def ask(self, question: Question) -> dict[str, object]:
        """Its answer. Raises NotDone: it refuses or fails; OSError: it is not there."""
        with socket.socket(socket.AF_UNIX) as helper:
            helper.settimeout(ANSWER_SECONDS)
            helper.connect(str(self._path))
            helper.sendall(json.dumps(dict(question)).encode())
            helper.shutdown(socket.SHUT_WR)
            try:
                found = dict(json.loads(_read(helper)))
            except ValueError as problem:
                raise NotDone("it ended before it answered") from problem
        if "error" in found:
            raise NotDone(str(found["error"]))
        return found


# --- the helper's side ---
class Brick:
    """os-brick in this process. ``execute``: in place of its own way to run programs; ``devices``:
    where volumes are found; ``state``: what is kept of them until they are let go."""

    def __init__(
        self,
        devices: Path = DEVICES,
        state: Path = STATE,
        execute: Callable[..., tuple[str, str]] | None = None,
    ) -> None:
        from os_brick import privileged
        from os_brick.initiator import connector
        from oslo_config import cfg

        # What os-brick would have another process do, this one does: that is what it is for.
        for context in (privileged.default, privileged.brick_privsep_hide_output):
            context.set_client_mode(False)
        cfg.CONF.set_override("lock_path", str(state), "os_brick")
        self._library, self._execute = connector, execute
        self._devices, self._state = devices, state
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def answer(self, question: Question) -> dict[str, object]:
        """Raises NotDone."""
        verb = question.get("verb")
        try:
            if verb == "host":
                return self._host(question)
            if verb not in ("connect", "disconnect"):
                raise NotDone(f"there is no verb {verb!s:.20}")
            volume, protocol, data = understood(question)
            with self._of(volume):
                if verb == "connect":
                    return self._connect(volume, protocol, data, question)
                self._disconnect(volume, protocol, data, question)
                return {}
        except NotDone:
            raise
        except Exception as problem:  # noqa: BLE001 - os-brick's, its libraries', the kernel's
            said = f"{type(problem).__name__}: {problem}"
            raise NotDone(without_passwords(said, question)[:1000]) from None

    def _of(self, volume: str) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(volume, threading.Lock())

    def _host(self, question: Question) -> dict[str, object]:
        multipath = question.get("multipath") is True
        found = self._library.get_connector_properties(
            None,
            str(question.get("ip") or ""),
            multipath,
            enforce_multipath=multipath,
            host=str(question.get("host") or ""),
            execute=self._execute,
        )
        return {name: value for name, value in dict(found).items() if value is not None}

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
        self._keep(volume, self._kept(volume))  # so that what is half connected is let go of
        info = dict(connector.connect_volume(dict(data)))
        path = os.fsdecode(info["path"])
        info["path"] = path
        self._keep(volume, info)
        size = _size(path)
        if size < int(str(question.get("at_least") or 0)):
            connector.extend_volume(dict(data))  # it has grown since this host connected it
            size = _size(path)
        self._link(volume, os.path.realpath(path))
        return {"size_bytes": size, "serial": _serial(info)}

    def _disconnect(
        self, volume: str, protocol: str, data: dict[str, object], question: Question
    ) -> None:
        info = self._kept(volume)
        if info is None:
            return
        # No cache of this host is between QEMU and the device: nothing is lost with a failed flush.
        self._connector(protocol, question).disconnect_volume(dict(data), info, force=True)
        (self._devices / volume).unlink(missing_ok=True)
        self._file(volume).unlink(missing_ok=True)

    def _link(self, volume: str, path: str) -> None:
        self._devices.mkdir(mode=0o755, exist_ok=True)
        part = self._devices / f"{volume}.part"
        part.unlink(missing_ok=True)
        part.symlink_to(path)
        part.replace(self._devices / volume)

    # --- what is kept ---
    def _file(self, volume: str) -> Path:
        return self._state / f"{volume}.json"

    def _kept(self, volume: str) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._file(volume).read_text()))
        except FileNotFoundError:
            return None

    def _keep(self, volume: str, info: Mapping[str, Any] | None) -> None:
        part = self._file(volume).with_suffix(".part")
        part.write_text(json.dumps(dict(info or {})))
        part.replace(self._file(volume))


def understood(question: Question) -> tuple[str, str, dict[str, object]]:
    """Volume, protocol, and what may be used of the data. Raises NotDone."""
    volume, protocol, data = (question.get(name) for name in ("volume", "protocol", "data"))
    if not isinstance(volume, str) or not ID.fullmatch(volume):
        raise NotDone("the volume's id is not a UUID")
    shapes = SHAPES.get(str(protocol))
    if shapes is None or not isinstance(data, Mapping):
        raise NotDone(f"volumes are not reached by {protocol!s:.40} here")
    used: dict[str, object] = {}
    for name, shape in shapes.items():
        value = data.get(name)
        if value is None:
            continue
        if not all(re.fullmatch(shape, text, re.ASCII) for text in _texts(value)):
            raise NotDone(f"{name} is not what it is in {protocol}")
        used[name] = value
    if not used:
        raise NotDone("the connection names nothing")
    return volume, str(protocol), used


def without_passwords(text: str, question: Question) -> str:
    """What a failure says, without what the question holds in confidence."""
    data = question.get("data")
    for name, value in data.items() if isinstance(data, Mapping) else ():
        if name.endswith("password") and value:
            text = text.replace(str(value), "***")
    return text


def _texts(value: object) -> list[str]:
    """All that a value holds, as text; keys of objects too."""
    if isinstance(value, Mapping):
        return [text for pair in value.items() for part in pair for text in _texts(part)]
    if isinstance(value, list):
        return [text for part in value for text in _texts(part)]
    return [str(value)]


def _size(path: str) -> int:
    with open(path, "rb") as device:
        return device.seek(0, os.SEEK_END)


def _serial(info: Mapping[str, Any]) -> str:
    """The device's world-wide name; "" when it has none."""
    found = str(info.get("scsi_wwn") or "")
    if not found:
        name = os.path.basename(os.path.realpath(str(info["path"])))
        with contextlib.suppress(OSError):
            found = Path("/sys/class/block", name, "wwid").read_text().strip()
    return "" if found.startswith(NO_WORLD_WIDE_NAME) else found


def serve(where: socket.socket, brick: Brick) -> None:
    """Answer callers, each by a thread, until the process ends."""
    while True:
        caller, _ = where.accept()
        threading.Thread(target=_serve_one, args=(caller, brick), daemon=True).start()


def _serve_one(caller: socket.socket, brick: Brick) -> None:
    with caller, contextlib.suppress(OSError):
        caller.settimeout(SAY_SECONDS)
        try:
            question = json.loads(_read(caller))
            found = brick.answer(question if isinstance(question, dict) else {})
        except (NotDone, ValueError) as problem:
            LOG.warning("%s", problem)
            found = {"error": str(problem)}
        caller.sendall(json.dumps(found).encode())


def _read(by: socket.socket) -> bytes:
    """All that the other end says, if it is not too much."""
    data = b""
    while len(data) <= MOST_BYTES and (piece := by.recv(MOST_BYTES)):
        data += piece
    return data


def main() -> int:
    """Serve on the socket that systemd gives."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        sys.exit("There is no socket: start it by kilonova-volumes.socket.")
    serve(socket.socket(fileno=SYSTEMD_DESCRIPTOR), Brick())
    return 0


if __name__ == "__main__":
    sys.exit(main())
