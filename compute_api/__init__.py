# SPDX-License-Identifier: Apache-2.0
"""The HTTP services: Compute API, placement, metadata, console and image gateway.

All share the HTTP layer ``compute_api.http`` (decision 0001).
"""
