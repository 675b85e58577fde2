# SPDX-License-Identifier: Apache-2.0
"""Options in files of their own: secrets, for example ``identity.password``, and certificates.

A credential is a file named SECTION.OPTION. Such a file is either a credential of systemd
(LoadCredential= of a unit, in $CREDENTIALS_DIRECTORY) or in the folder ``secrets`` beside the
configuration, which commands read too. Every option may be a credential. Files with other names are
ignored.

If no option names certificates, a process uses the files in the folder ``tls`` beside the
configuration. Agents use neither folder, because their options are all in their file. File and
environment take precedence over credentials. ``origins`` has the origin of each value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from oslo_config import cfg, sources

ENVIRONMENT = "CREDENTIALS_DIRECTORY"
FOLDER = "secrets"  #: beside the configuration
TLS_FOLDER = "tls"  #: beside the configuration
#: The files in that folder. own.pem has both certificate and key.
TLS_FILES = {
    "tls.ca_file": "ca.pem",
    "tls.cert_file": "own.pem",
    "tls.ca_key_file": "ca.key",
}


class CredentialSource(sources.ConfigurationSource):
    """The credentials of this process, for oslo.config.

    Args:
        beside: The folder of the configuration file, which may contain the folders ``secrets`` and
            ``tls``. None: neither folder is used.

    Raises:
        OSError: A credential cannot be read.
        ValueError: Other users can read ``secrets``, or a credential is also one of systemd.
    """

    def __init__(self, beside: Path | None = None) -> None:
        super().__init__()
        self._beside = beside
        self.values: dict[str, str] = {}
        self.origins: dict[str, str] = {}
        of_systemd = dict(_read(os.environ.get(ENVIRONMENT)))
        self.add(of_systemd, {name: f"credential {name}" for name in of_systemd})
        if beside is not None:
            own = dict(_read(_check_private(beside / FOLDER)))
            if duplicates := own.keys() & of_systemd.keys():
                raise ValueError(
                    f"{min(duplicates)} is both a credential of systemd and a file in {beside / FOLDER}: remove one"
                )
            self.add(own, {name: str(beside / FOLDER / name) for name in own})
        self.given = frozenset(self.values)  #: names of credentials

    def add(self, values: Mapping[str, str], origins: Mapping[str, str]) -> None:
        """Add the values and origins of options (``api.port``). Options with a value keep it."""
        self.values = {**values, **self.values}
        self.origins = {**origins, **self.origins}

    def add_tls_files(self) -> bool:
        """Set the options in ``TLS_FILES`` whose file exists in the folder ``tls``.

        Return False if no file exists, or if this process does not use the folder.
        """
        if self._beside is None:
            return False
        paths = {name: self._beside / TLS_FOLDER / file for name, file in TLS_FILES.items()}
        files = {name: str(path) for name, path in paths.items() if path.exists()}
        self.add(files, dict.fromkeys(files, f"found in {self._beside / TLS_FOLDER}"))
        return bool(files)

    def get(
        self, group_name: str | None, option_name: str, opt: cfg.Opt
    ) -> tuple[object, cfg.LocationInfo | None]:
        name = f"{group_name or 'DEFAULT'}.{option_name}"
        if name not in self.values:
            return sources._NoValue, None
        where = cfg.LocationInfo(cfg.Locations.user, self.origins[name])
        return self.values[name].replace(
            "$", "$$"
        ), where  # Escaped, because "$" refers to another option.


def _check_private(folder: Path) -> Path | None:
    """Return the folder if it exists, otherwise None.

    Raises:
        OSError: The folder's mode cannot be read.
        ValueError: Other users can list or enter the folder.
    """
    try:
        open_to_others = folder.stat().st_mode & 0o005
    except FileNotFoundError:
        return None
    if open_to_others:
        raise ValueError(f"other users can read {folder}; run: chmod o= {folder}")
    return folder


def _read(folder: str | Path | None) -> Iterator[tuple[str, str]]:
    for path in sorted(Path(folder).iterdir()) if folder else ():
        if path.name.count(".") == 1 and path.is_file():
            yield path.name, path.read_text().rstrip("\n")
