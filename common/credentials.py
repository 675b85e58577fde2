# SPDX-License-Identifier: Apache-2.0
"""Options from systemd's credentials: files of $CREDENTIALS_DIRECTORY with names like
``identity.password``.

So no secret need stand in a file that lies there for good: LoadCredential= or
LoadCredentialEncrypted= of a unit names it as the option, SECTION.OPTION. Every option may come so;
files with other names are somebody else's. A credential counts where the file and the environment
say nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from oslo_config import cfg, sources

ENVIRONMENT = "CREDENTIALS_DIRECTORY"


class CredentialSource(sources.ConfigurationSource):
    """The credentials of this process, for oslo.config.

    Raises:
        OSError, ValueError: one of them cannot be read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = dict(_read())

    def get(
        self, group_name: str | None, option_name: str, opt: cfg.Opt
    ) -> tuple[object, cfg.LocationInfo | None]:
        name = f"{group_name or 'DEFAULT'}.{option_name}"
        if name not in self.values:
            return sources._NoValue, None
        where = cfg.LocationInfo(cfg.Locations.user, f"credential {name}")
        return self.values[name].replace("$", "$$"), where  # a "$" would name another option


def _read() -> Iterator[tuple[str, str]]:
    folder = os.environ.get(ENVIRONMENT)
    for path in sorted(Path(folder).iterdir()) if folder else ():
        if path.name.count(".") == 1 and path.is_file():
            yield path.name, path.read_text().rstrip("\n")
