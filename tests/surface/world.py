# SPDX-License-Identifier: Apache-2.0
"""All services of one cloud in this process, and every operation that they offer."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

from tests.surface import operations, signed
from tests.surface.compute import Compute
from tests.surface.identity import Identity
from tests.surface.operations import Operation
from tests.surface.site import Site
from tests.surface.standalone import Standalone


class World:
    """``sites`` by the names of the services; ``operations`` in the order of their tables;
    ``signed``: those of who has no token."""

    def __init__(self, folder: Path) -> None:
        # it warns of its own cache
        logging.getLogger("keystonemiddleware.auth_token").setLevel(logging.ERROR)
        self._identity = Identity(folder)
        self.compute = Compute(folder, self._identity)
        self._standalone = Standalone(folder, self._identity)
        self.users = self._identity.users
        self.sites: dict[str, Site] = {
            one.name: one
            for one in (
                self.compute.site,
                self.compute.placement,
                *self._standalone.sites,
                signed.metadata_site(self.compute),
                signed.gateway_site(self.compute),
            )
        }
        self.operations: list[Operation] = [
            *operations.told_apart(operations.compute()),
            *operations.told_apart(operations.placement()),
            *(
                found
                for name, application in self._standalone.applications.items()
                for found in operations.standalone(name, application)
            ),
        ]
        self.signed = list(signed.operations())

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._standalone.close()
        self.compute.close()
        self._identity.close()
