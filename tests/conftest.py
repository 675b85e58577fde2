# SPDX-License-Identifier: Apache-2.0
"""Fixtures for every ring; those of one noun stand beside its tests."""
from tests.services import database_url, libvirt_uri, new_database, rabbitmq_url

__all__ = ["database_url", "libvirt_uri", "new_database", "rabbitmq_url"]
