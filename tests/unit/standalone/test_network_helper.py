# SPDX-License-Identifier: Apache-2.0
"""The helper of the network's host part: its verbs and their types, who may call, and what is no
message."""

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


class Part:
    """Stands for the privileged end: writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.tree: Any = None
        self.is_whole, self.listening = True, {"kn-net": "net"}

    def prepare(self) -> None:
        self.asked.append("prepare")

    def save(self) -> None:
        self.asked.append("keep")

    def restore(self) -> None:
        self.asked.append("restore")

    def accept(self, tree: Any) -> bool:
        self.tree = tree
        return "revision" in tree

    def apply(self, full: bool) -> dict[str, str]:
        self.asked.append(("apply", self.tree, full))
        return {"port": "reason"}

    def listen(self, namespace: str, address: str, port: int) -> socket.socket:
        self.asked.append(("listen", namespace, address, port))
        return socket.socket()

    def namespace_id(self, namespace: str) -> int:
        return 7


@contextmanager
def talking(part: Part, user: int | None = None) -> Iterator[tuple[socket.socket, list[Exception]]]:
    """A connection to a helper that serves this user, ours if none is given; what it ended with."""
    ours, theirs = socket.socketpair()
    ended: list[Exception] = []

    def talk() -> None:
        with theirs:
            try:
                Helper(
                    cast("Any", part), cast("Any", part), os.getuid() if user is None else user
                ).serve_caller(theirs)
            except (OSError, InvalidMessage) as problem:
                ended.append(problem)

    thread = threading.Thread(target=talk)
    thread.start()
    with ours:
        yield ours, ended
        ours.shutdown(socket.SHUT_WR)
        thread.join(10)
    assert not thread.is_alive()


def said(message: object) -> bytes:
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


@given(st.dictionaries(NAMES | st.text(max_size=6), JSON, max_size=5) | JSON)
def test_only_verbs_with_their_arguments_are_taken(message: Any) -> None:
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
def test_a_verb_is_taken_with_exactly_its_arguments(verb: str, arguments: dict[str, Any]) -> None:
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
        said({"verb": "apply", "tree": {}, "full": 1}),
        said({"verb": "__init__"}),
        said({"verb": "listen", "space": ["kn-net"]}),
        said({"verb": "prepare", "user": 0}),
        said([]),
    ],
)
def test_invalid_message_ends_the_connection(data: bytes) -> None:
    part = Part()
    with talking(part) as (caller, ended):
        caller.sendall(data)
        caller.shutdown(socket.SHUT_WR)
        assert caller.recv(1) == b""
    assert [type(one) for one in ended] == [InvalidMessage]
    assert part.asked == []


def test_another_user_is_not_heard() -> None:
    part = Part()
    with talking(part, user=os.getuid() + 1) as (caller, ended):
        assert caller.recv(1) == b""
    assert "may not call" in str(ended[0])
    assert part.asked == []


def test_the_client_does_what_the_helper_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LISTEN_PID", raising=False)
    part, where = Part(), tmp_path / "s"
    with listening_socket(where) as door:
        helper = Helper(cast("Any", part), cast("Any", part), os.getuid())
        client = HelperClient(where)
        caller, _ = door.accept()
        threading.Thread(target=helper.talk, args=(caller,), daemon=True).start()
        client.prepare()
        assert client.restore() is None
        tree = {"revision": 3, "host": "x1"}
        assert client.accept(tree)
        assert client.apply(full=True) == {"port": "reason"}
        assert (client.revision, client.is_whole, client.namespace_id("kn-net")) == (3, True, 7)
        client.apply()
        client.save()
        with client.listen("kn-net", "0.0.0.0", 22) as made:
            assert made.family == socket.AF_INET
        with pytest.raises(OSError, match="nothing is to be listened to"):
            client.listen("../../other", "0.0.0.0", 80)
        with pytest.raises(FileNotFoundError):
            client.namespace_id("other")
        part.tree = None
        client.tree, client._is_sent = {}, False  # the helper takes nothing on trust
        with pytest.raises(KernelError, match="not understood"):
            client.apply()
    assert part.asked == [
        "prepare",
        "restore",
        ("apply", tree, True),
        ("apply", tree, False),
        "keep",
        ("listen", "kn-net", "169.254.169.254", 80),
    ]
