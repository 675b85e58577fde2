# SPDX-License-Identifier: Apache-2.0
"""The tables of the release 0.1.0.

A new database gets the newest tables at once, so no database is upgraded to this version.
"""

revision = "0001"
down_revision = None
USABLE_FROM = "0001"


def upgrade() -> None:
    """Do nothing, because databases of this version exist already."""
