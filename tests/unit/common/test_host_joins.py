# SPDX-License-Identifier: Apache-2.0
"""Join tokens of hosts: their text, their key, and the envelope that carries the identity."""

from __future__ import annotations

import base64
import json
import zlib

import pytest

from common.security.host_joins import BEGIN, Envelope, JoinToken, seal_for
from common.security.host_keys import AllKeys, Generations, NotGenuine, OwnKeys, Purpose, derive
from tests.unit.common.test_host_keys import Table

TOKEN = JoinToken("h1", 7, "ab" * 32, "rabbit://kilonova-join-h1:p@broker:5671/", "PEM\n" * 300)


def test_join_token_text_is_one_word_and_its_repr_hides_secrets() -> None:
    text = TOKEN.text()
    assert text.startswith(BEGIN) and text.isascii() and len(text.split()) == 1
    assert JoinToken.read(text) == TOKEN
    assert JoinToken.read(f" {text[:40]}\n{text[40:]}\n") == TOKEN, "a terminal wrapped the token"
    assert "ab" * 8 not in repr(TOKEN) and "kilonova-join" not in repr(TOKEN)


def pack(content: object) -> str:
    return (
        BEGIN + base64.urlsafe_b64encode(zlib.compress(json.dumps(content).encode())).decode()
    ).rstrip("=")


@pytest.mark.parametrize(
    "text",
    [
        TOKEN.text()[:-9],
        TOKEN.text()[:12],
        BEGIN,
        BEGIN + "!!!!",
        pack([1]),
        pack({"host": "h1"}),
        pack({"host": "h1", "generation": "x", "secret": "ab", "transport_url": "r"}),
        pack({"host": "h1", "generation": 1, "secret": "no digits", "transport_url": "r"}),
        pack({"x": "y" * (1 << 19)}),
    ],
)
def test_join_token_read_refuses_incomplete_or_damaged_token(text: str) -> None:
    with pytest.raises(ValueError, match="not whole: copy the whole token"):
        JoinToken.read(text)


@pytest.mark.parametrize("text", ["", "h1", "join2.abc", BEGIN + "A" * 70000])
def test_join_token_read_refuses_text_other_than_a_join_token(text: str) -> None:
    with pytest.raises(ValueError, match="kilonova host add NAME"):
        JoinToken.read(text)


def test_join_token_key_differs_from_the_keys_of_the_host() -> None:
    keys = Table(h1=Generations(7)).keys()
    own = keys.find("h1", 7, Purpose.JOIN)
    token = JoinToken("h1", 7, own.secret.hex(), "")
    assert token.keys.newest("h1", Purpose.JOIN) == own
    assert own.secret not in {
        keys.find("h1", 7, purpose).secret for purpose in (Purpose.COMMAND, Purpose.QUERY)
    }
    for host, generation, purpose in (
        ("h2", 7, Purpose.JOIN),
        ("h1", 8, Purpose.JOIN),
        ("h1", 7, Purpose.COMMAND),
        ("h1", 7, Purpose.QUERY),
    ):
        with pytest.raises(NotGenuine):
            token.keys.find(host, generation, purpose)
    assert set(keys.for_host("h1").secrets) == {"command", "query"}
    with pytest.raises(NotGenuine, match="purpose join"):
        keys.for_host("h1").find("h1", 7, Purpose.JOIN)


def test_host_keys_and_broker_password_are_derived_from_host_and_generation() -> None:
    keys: AllKeys = Table(h1=Generations(8, accepts_previous=True)).keys()
    own = keys.for_host("h1", "url", 7)
    assert own == OwnKeys(
        "h1",
        7,
        {
            "command": derive("one", "h1", 7, Purpose.COMMAND).secret.hex(),
            "query": derive("two", "h1", 7, Purpose.QUERY).secret.hex(),
        },
        "url",
    )
    passwords = {
        keys.broker_password(host, generation) for host in ("h1", "h2") for generation in (7, 8)
    }
    assert len(passwords) == 4 and keys.broker_password("h1", 7) in passwords
    assert passwords.isdisjoint(own.secrets.values())


def test_sealed_identity_opens_only_in_the_envelope_of_the_requester() -> None:
    requester, other = Envelope(), Envelope()
    sealed = seal_for(requester.public, {"key_file": "k"})
    assert requester.open(sealed) == {"key_file": "k"}
    assert b"key_file" not in bytes.fromhex(sealed["body"])
    for envelope, content in (
        (other, sealed),
        (requester, {**sealed, "public": other.public}),
        (
            requester,
            {**sealed, "body": sealed["body"][:-1] + ("1" if sealed["body"][-1] == "0" else "0")},
        ),
        (requester, {**sealed, "body": ""}),
        (requester, {"public": sealed["public"]}),
        (requester, {**sealed, "public": "00" * 32}),
    ):
        with pytest.raises(NotGenuine):
            envelope.open(content)


@pytest.mark.parametrize("public", ["", "xy", "ab", "00" * 32])
def test_seal_for_refuses_invalid_public_key(public: str) -> None:
    with pytest.raises(ValueError):
        seal_for(public, {})
