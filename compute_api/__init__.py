# SPDX-License-Identifier: Apache-2.0
"""The HTTP services: Compute API, placement, metadata, console and image gateway, over one edge
(decision 0001)."""
