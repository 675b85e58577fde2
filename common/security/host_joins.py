# SPDX-License-Identifier: Apache-2.0
"""Join tokens, which ``kilonova host add`` prints, and the envelope of the identity.

A token contains no identity. The token's key permits two requests to a conductor: the state of the
token, and once the identity (``common.rpc.host_credentials``). The identity is sealed for a fresh
key pair of the requesting machine, so a token that leaks later opens no recorded message.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import asdict, dataclass, field

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from common.domain.json_types import JsonObject
from common.security.host_keys import HostKey, NotGenuine, OwnKeys, Purpose

#: The prefix of every token, which names the format.
BEGIN = "join1."
_MOST_CHARACTERS, _MOST_BYTES = 65536, 1 << 18


@dataclass(frozen=True, slots=True)
class JoinToken:
    """A permission for one machine to become a host, once."""

    host: str
    generation: int  #: of the keys that the host will get
    secret: str = field(repr=False)  #: the key of purpose JOIN, in hexadecimal digits
    transport_url: str = field(repr=False)  #: the broker at the address for hosts, with a user
    ca: str = ""  #: PEM of [tls] ca_file; empty without TLS
    allow_plain_text: bool = False

    def text(self) -> str:
        """Return the token as one word, which ``read`` parses."""
        packed = zlib.compress(json.dumps(asdict(self)).encode(), 9)
        return BEGIN + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def read(cls, text: str) -> JoinToken:
        """Parse a token.

        Raises:
            ValueError: The text is not a token, or only a part of one.
        """
        text = "".join(text.split())  # A terminal may have broken the line.
        if not text.startswith(BEGIN) or len(text) > _MOST_CHARACTERS:
            raise ValueError(
                f"this is no token of a host, because a token begins with {BEGIN}; to print a token, run "
                "kilonova host add NAME on a machine with a conductor"
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
                "the token is not whole: copy the whole token that kilonova host add NAME printed"
            ) from problem
        return token

    @property
    def keys(self) -> OwnKeys:
        """The key of the token, in the form of a host's keys."""
        return OwnKeys(self.host, self.generation, {Purpose.JOIN: self.secret})


class Envelope:
    """A key pair with which one machine receives one encrypted answer.

    The machine sends ``public`` in the request, and the sender of the answer calls ``seal_for``.
    """

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()

    def open(self, sealed: JsonObject) -> JsonObject:
        """Return the decrypted content of an answer.

        Raises:
            NotGenuine: The answer was not sealed for this envelope, or contains no JSON object.
        """
        try:
            other, body = str(sealed["public"]), bytes.fromhex(sealed["body"])
            key = _shared_key(self._private, other, self.public, other)
            content = json.loads(key.open(body, b""))
        except (ValueError, KeyError, TypeError) as problem:
            raise NotGenuine("the answer was not sealed for this machine's request") from problem
        if not isinstance(content, dict):
            raise NotGenuine("the sealed answer is no JSON object")
        return content


def seal_for(public: str, content: JsonObject) -> JsonObject:
    """Return the answer encrypted, so that only the ``Envelope`` with this public key can open it.

    Raises:
        ValueError: ``public`` is not a key.
    """
    own = Envelope()
    key = _shared_key(own._private, public, public, own.public)
    return {"public": own.public, "body": key.seal(json.dumps(content).encode(), b"").hex()}


def _shared_key(private: X25519PrivateKey, other: str, asker: str, sealer: str) -> HostKey:
    shared = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    about = json.dumps(["host join", asker, sealer]).encode()
    return HostKey("", 0, Purpose.JOIN, HKDF(hashes.SHA256(), 32, None, about).derive(shared))
