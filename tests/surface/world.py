# SPDX-License-Identifier: Apache-2.0
"""All services of one cloud in this process, with their operations."""

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
    """The services of a cloud.

    ``sites`` has the services by name. ``operations`` has the operations in the order of the
    routing tables. ``signed`` has the operations of services without tokens.
    """

    def __init__(self, folder: Path) -> None:
        # keystonemiddleware warns about its in-process cache.
        logging.getLogger("keystonemiddleware.auth_token").setLevel(logging.ERROR)
        self._identity = Identity(folder)
        self.compute = Compute(folder, self._identity)
        self._standalone = Standalone(folder, self._identity)
        self.users = self._identity.users
        self.sites: dict[str, Site] = {
            site.name: site
            for site in (
                self.compute.site,
                self.compute.placement,
                *self._standalone.sites,
                signed.metadata_site(self.compute),
                signed.gateway_site(self.compute),
            )
        }
        self.operations: list[Operation] = [
            *operations.mark_older(operations.compute()),
            *operations.mark_older(operations.placement()),
            *(
                operation
                for name, application in self._standalone.applications.items()
                for operation in operations.standalone(name, application)
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
