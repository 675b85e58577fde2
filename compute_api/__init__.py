# SPDX-License-Identifier: Apache-2.0
"""The HTTP services: Compute API, placement, metadata, console and image gateway.

They share the code in ``compute_api.http`` (docs/decisions/0001).
"""
