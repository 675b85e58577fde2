# SPDX-License-Identifier: Apache-2.0
"""What makes a machine a host of a cloud: the token that ``kilonova host add`` prints, and the
envelope in which the host's identity comes to who has it.

A token contains no identity. Its key opens two questions to a conductor: the state of the token,
and once the identity (``common.rpc.host_credentials``). The identity is sealed for a key pair that
the asker has just made. So a token that leaks later opens no recorded message.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from dataclasses import asdict, dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from common.host_keys import HostKey, NotGenuine, OwnKeys, Purpose
from common.json_types import JsonObject

BEGIN = "join1."  #: of every token: what it is, and how it is written
_MOST_CHARACTERS, _MOST_BYTES = 65536, 1 << 18
_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class JoinToken:
    """``secret``: the key of purpose JOIN, in hexadecimal digits. ``transport_url``: the broker,
    where hosts reach it, in the name of who joins. ``ca``: PEM of [tls] ca_file; empty: no TLS.
    """

    host: str
    generation: int
    secret: str = field(repr=False)
    transport_url: str = field(repr=False)
    ca: str = ""
    allow_plain_text: bool = False

    def text(self) -> str:
        """One word."""
        packed = zlib.compress(json.dumps(asdict(self)).encode(), 9)
        return BEGIN + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> JoinToken:
        """The token of a text.

        Raises:
            ValueError: it is none, or a part of one.
        """
        text = "".join(text.split())  # a terminal may have broken it
        if not text.startswith(BEGIN) or len(text) > _MOST_CHARACTERS:
            raise ValueError(
                f"this is no token of a host: it begins with {BEGIN}; kilonova host add NAME, where a "
                "conductor runs, prints one"
            )
        packed = text.removeprefix(BEGIN)
        try:
            unpacked = zlib.decompressobj().decompress(
                base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), _MOST_BYTES
            )
            token = cls(**json.loads(unpacked))
            HostKey(token.host, int(token.generation), Purpose.JOIN, bytes.fromhex(token.secret))
        except (ValueError, TypeError, zlib.error) as problem:
            raise ValueError(
                "the token is not whole: copy all of what kilonova host add NAME printed"
            ) from problem
        return token

    @property
    def keys(self) -> OwnKeys:
        """The token's one key."""
        return OwnKeys(self.host, self.generation, {Purpose.JOIN: self.secret})


class Envelope:
    """A key pair for one answer; ``public`` is told to who seals it."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()

    def open(self, sealed: JsonObject) -> JsonObject:
        """What it holds.

        Raises:
            NotGenuine: it was not sealed for this envelope.
        """
        try:
            other, body = str(sealed["public"]), bytes.fromhex(sealed["body"])
            cipher = _cipher(self._private, other, self.public, other)
            found = json.loads(cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], None))
        except (InvalidTag, ValueError, KeyError, TypeError) as problem:
            raise NotGenuine("it was not sealed for this envelope") from problem
        if not isinstance(found, dict):
            raise NotGenuine("it holds no object")
        return found


def seal_for(public: str, content: JsonObject) -> JsonObject:
    """Content that only the envelope with this public key opens. Raises ValueError: it is none."""
    own, nonce = Envelope(), os.urandom(_NONCE_BYTES)
    cipher = _cipher(own._private, public, public, own.public)
    body = nonce + cipher.encrypt(nonce, json.dumps(content).encode(), None)
    return {"public": own.public, "body": body.hex()}


def _cipher(private: X25519PrivateKey, other: str, asker: str, sealer: str) -> AESGCM:
    shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    about = json.dumps(["host join", asker, sealer]).encode()
    return AESGCM(HKDF(hashes.SHA256(), 32, None, about).derive(shared))
