# SPDX-License-Identifier: Apache-2.0
"""The Compute API: what tenants and admins speak to. ``app.create`` makes it, ``service.main`` runs it."""
