# SPDX-License-Identifier: Apache-2.0
"""The cloud's authority and the certificates of controllers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from common.domain.errors import ConfigError
from common.security.certificates import OF_HOSTS, Signer, new_authority, pem, private_pem
from common.service.credentials import TLS_FOLDER
from deploy.operator.hosts import join_checks
from deploy.operator.setup.machine import Machine, read
from deploy.operator.setup.plan import Step

#: The files of authority and controller, in the order in which they are written.
FILES = ("ca.key", "ca.pem", "own.pem")


class Certificates:
    """The folder ``tls`` of a controller: authority, its key, and the controller's certificate.

    Args:
        machine: The controller.
        address: The controller's address, for the certificate.
        texts: Name -> text of the files in a bundle. None: make new files.
    """

    def __init__(
        self, machine: Machine, address: str, texts: Mapping[str, str] | None = None
    ) -> None:
        self._machine, self._address, self._texts = machine, address, texts
        self._folder = machine.configuration.parent / TLS_FOLDER
        self.key, self.ca, self.own = (self._folder / name for name in FILES)

    def step(self) -> Step:
        title = f"certificates of the cloud's authority and of {self._address}, in {self._folder}"
        return Step(title, self._has_files, self._write)

    def _has_files(self) -> bool:
        """Return True if all files exist.

        A present certificate for the address stays, because each bundle has a new certificate.

        Raises:
            ConfigError: The present files do not belong together, are of another cloud, or are for
                another address.
        """
        for path in (self.key, self.ca):
            if self._texts and read(path) not in ("", self._texts[path.name]):
                raise ConfigError(f"{path} is of another cloud than the bundle")
        if not self.ca.exists():
            if self.own.exists():
                raise ConfigError(f"{self.own} exists without {self.ca}: add the authority's file")
            return False
        if self._texts is None:
            Signer.read(str(self.ca), str(self.key))
        own = str(self.own)
        is_whole = self.key.exists() and self.own.exists()
        return is_whole and bool(join_checks.certificate(own, own, str(self.ca), self._address))

    def _write(self) -> None:
        functions: tuple[Callable[[], str], ...] = (
            self._make_key,
            self._make_authority,
            lambda: self.issue(self._address),
        )
        for name, function in zip(FILES, functions, strict=True):
            if not (self._folder / name).exists():
                text = self._texts[name] if self._texts else function()
                self._machine.write(self._folder / name, text, 0o640, group="kilonova")

    def _make_key(self) -> str:
        return private_pem(_new_key())

    def _make_authority(self) -> str:
        # The key may be the rest of an interrupted run.
        key = load_pem_private_key(self.key.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{self.key} is no EC key: remove the file")
        return pem(new_authority("Kilonova", key))

    def issue(self, address: str) -> str:
        """Return a new certificate for a controller, followed by its key (PEM)."""
        key, signer = _new_key(), Signer.read(str(self.ca), str(self.key))
        certificate = signer.sign(key.public_key(), "controller", (address,), OF_HOSTS)
        return pem(certificate) + private_pem(key)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())
