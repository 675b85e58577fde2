# SPDX-License-Identifier: Apache-2.0
"""Options that stand in files of their own: secrets, as ``identity.password``, and certificates.

A credential is a file with an option's name, SECTION.OPTION: one of systemd's (LoadCredential= of a
unit, in $CREDENTIALS_DIRECTORY), or one of the folder ``secrets`` beside the configuration, which
commands read too. Every option may come so; files with other names are somebody else's. A process
finds certificates in the folder ``tls`` beside the configuration, where nobody names others. Both
folders are the control plane's: an agent's file says what it has. All that counts only where the
file and the environment say nothing, and ``origins`` tells where each value is from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from oslo_config import cfg, sources

ENVIRONMENT = "CREDENTIALS_DIRECTORY"
FOLDER = "secrets"  #: beside the configuration
TLS_FOLDER = "tls"  #: beside the configuration
#: What is found there; the second holds certificate and key.
TLS_FILES = {
    "tls.ca_file": "ca.pem",
    "tls.cert_file": "own.pem",
    "tls.ca_key_file": "ca.key",
}


class CredentialSource(sources.ConfigurationSource):
    """The credentials of this process, for oslo.config. ``beside``: the configuration's folder,
    where its own two are looked for; None: they are not.

    Raises:
        OSError, ValueError: one of them cannot be read, or others can.
    """

    def __init__(self, beside: Path | None = None) -> None:
        super().__init__()
        self._beside = beside
        self.values: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        of_systemd = dict(_read(os.environ.get(ENVIRONMENT)))
        self.add(of_systemd, {name: f"credential {name}" for name in of_systemd})
        if beside is not None:
            own = dict(_read(_closed(beside / FOLDER)))
            if twice := own.keys() & of_systemd.keys():
                raise ValueError(
                    f"{min(twice)} is a file of {beside / FOLDER} too: take one of the two away"
                )
            self.add(own, {name: str(beside / FOLDER / name) for name in own})
        self.given = frozenset(self.values)  #: names of credentials

    def add(self, values: Mapping[str, str], origins: Mapping[str, str]) -> None:
        """Options that follow from something else, and from what."""
        self.values |= values
        self.origins |= origins

    def add_tls_files(self) -> bool:
        """Whether there are some in their usual place, which count from now on."""
        if self._beside is None:
            return False
        places = {name: self._beside / TLS_FOLDER / file for name, file in TLS_FILES.items()}
        found = {name: str(path) for name, path in places.items() if path.exists()}
        self.add(found, dict.fromkeys(found, f"found in {self._beside / TLS_FOLDER}"))
        return bool(found)

    def get(
        self, group_name: str | None, option_name: str, opt: cfg.Opt
    ) -> tuple[object, cfg.LocationInfo | None]:
        name = f"{group_name or 'DEFAULT'}.{option_name}"
        if name not in self.values:
            return sources._NoValue, None
        where = cfg.LocationInfo(cfg.Locations.user, self.origins[name])
        return self.values[name].replace("$", "$$"), where  # a "$" would name another option


def _closed(folder: Path) -> Path | None:
    """The folder, where there is one. Raises ValueError: others can read what is in it."""
    try:
        open_to_others = folder.stat().st_mode & 0o005
    except FileNotFoundError:
        return None
    if open_to_others:
        raise ValueError(f"others may read {folder}: chmod o= {folder}")
    return folder


def _read(folder: str | Path | None) -> Iterator[tuple[str, str]]:
    for path in sorted(Path(folder).iterdir()) if folder else ():
        if path.name.count(".") == 1 and path.is_file():
            yield path.name, path.read_text().rstrip("\n")
