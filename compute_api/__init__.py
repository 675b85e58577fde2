# SPDX-License-Identifier: Apache-2.0
"""The HTTP services: Compute API, placement, metadata, console and image gateway.

All use the same HTTP server, middleware and error handling, in ``compute_api.http`` (decision 0001).
"""
