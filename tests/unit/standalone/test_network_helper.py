# SPDX-License-Identifier: Apache-2.0
"""The privileged helper of the network's host part: verbs, types, callers, malformed messages."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.one_machine.services.network.host.helper import (
    LENGTH,
    VERBS,
    Helper,
    HelperClient,
    InvalidMessage,
    listening_socket,
    validate,
)
from deploy.one_machine.services.network.host.kernel import KernelError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(["verb", "tree", "full", "space", "netns"])


class RecordingPart:
    """A fake privileged part that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tree: Any = None
        self.is_whole, self.listening = True, {"kn-net": "net"}

    def prepare(self) -> None:
        self.calls.append("prepare")

    def save(self) -> None:
        self.calls.append("keep")

    def restore(self) -> None:
        self.calls.append("restore")

    def accept(self, tree: Any) -> bool:
        self.tree = tree
        return "revision" in tree

    def apply(self, full: bool) -> dict[str, str]:
        self.calls.append(("apply", self.tree, full))
        return {"port": "reason"}

    def listen(self, namespace: str, address: str, port: int) -> socket.socket:
        self.calls.append(("listen", namespace, address, port))
        return socket.socket()

    def namespace_id(self, namespace: str) -> int:
        return 7


@contextmanager
def connect_helper(
    part: RecordingPart, user: int | None = None
) -> Iterator[tuple[socket.socket, list[Exception]]]:
    """Yield a connection to a helper for this user (default: ours), and the helper's errors."""
    ours, theirs = socket.socketpair()
    errors: list[Exception] = []

    def talk() -> None:
        with theirs:
            try:
                Helper(
                    cast("Any", part), cast("Any", part), os.getuid() if user is None else user
                ).serve_caller(theirs)
            except (OSError, InvalidMessage) as problem:
                errors.append(problem)

    thread = threading.Thread(target=talk)
    thread.start()
    with ours:
        yield ours, errors
        ours.shutdown(socket.SHUT_WR)
        thread.join(10)
    assert not thread.is_alive()


def encode(message: object) -> bytes:
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


@given(st.dictionaries(NAMES | st.text(max_size=6), JSON, max_size=5) | JSON)
def test_network_helper_accepts_only_verbs_with_valid_arguments(message: Any) -> None:
    try:
        verb, arguments = validate(message)
    except InvalidMessage:
        return
    assert arguments.keys() == VERBS[verb].keys()
    assert all(type(arguments[name]) in types for name, types in VERBS[verb].items())


@given(
    st.sampled_from(sorted(VERBS)),
    st.dictionaries(st.sampled_from(["tree", "full", "space"]), JSON, max_size=3),
)
def test_network_helper_verb_requires_exactly_its_arguments(
    verb: str, arguments: dict[str, Any]
) -> None:
    fits = arguments.keys() == VERBS[verb].keys() and all(
        type(value) in VERBS[verb][name] for name, value in arguments.items()
    )
    if fits:
        assert validate({"verb": verb, **arguments}) == (verb, arguments)
    else:
        with pytest.raises(InvalidMessage):
            validate({"verb": verb, **arguments})


@pytest.mark.parametrize(
    "data",
    [
        b"x",
        LENGTH.pack(0),
        LENGTH.pack(2**31),
        LENGTH.pack(5) + b"{}",
        LENGTH.pack(2) + b"{]",
        LENGTH.pack(60_000) + b"[" * 60_000,
        encode({"verb": "apply", "tree": {}, "full": 1}),
        encode({"verb": "__init__"}),
        encode({"verb": "listen", "space": ["kn-net"]}),
        encode({"verb": "prepare", "user": 0}),
        encode([]),
    ],
)
def test_network_helper_closes_connection_after_invalid_message(data: bytes) -> None:
    part = RecordingPart()
    with connect_helper(part) as (caller, errors):
        caller.sendall(data)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(1) == b""
    assert [type(error) for error in errors] == [InvalidMessage]
    assert part.calls == []


def test_network_helper_refuses_other_user() -> None:
    part = RecordingPart()
    with connect_helper(part, user=os.getuid() + 1) as (caller, errors):
        assert caller.recv(1) == b""
    assert "may not call" in str(errors[0])
    assert part.calls == []


def test_network_helper_client_runs_each_verb_and_raises_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LISTEN_PID", raising=False)
    part, path = RecordingPart(), tmp_path / "s"
    with listening_socket(path) as listener:
        helper = Helper(cast("Any", part), cast("Any", part), os.getuid())
        client = HelperClient(path)
        caller, _ = listener.accept()
        threading.Thread(target=helper.serve_caller, args=(caller,), daemon=True).start()
        client.prepare()
        assert client.restore() is None
        tree = {"revision": 3, "host": "x1"}
        assert client.accept(tree)
        assert client.apply(full=True) == {"port": "reason"}
        assert (client.revision, client.is_whole, client.namespace_id("kn-net")) == (3, True, 7)
        client.apply()
        client.save()
        with client.listen("kn-net", "0.0.0.0", 22) as listening:
            assert listening.family == socket.AF_INET
        with pytest.raises(OSError, match="needs no metadata listener"):
            client.listen("../../other", "0.0.0.0", 80)
        with pytest.raises(FileNotFoundError):
            client.namespace_id("other")
        part.tree = None
        client.tree, client._is_sent = {}, False  # the helper refuses the empty tree
        with pytest.raises(KernelError, match="the description is invalid"):
            client.apply()
    assert part.calls == [
        "prepare",
        "restore",
        ("apply", tree, True),
        ("apply", tree, False),
        "keep",
        ("listen", "kn-net", "169.254.169.254", 80),
    ]


def test_network_helper_client_raises_oserror_when_helper_dies_within_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LISTEN_PID", raising=False)
    path = tmp_path / "s"
    with listening_socket(path) as listener:
        client = HelperClient(path)
        caller, _ = listener.accept()
        with caller:
            caller.sendall(LENGTH.pack(5) + b"{}")
            caller.shutdown(socket.SHUT_WR)
            with pytest.raises(OSError, match="the message is incomplete"):
                client.listen("kn-net", "169.254.169.254", 80)
