# SPDX-License-Identifier: Apache-2.0
"""Clients of the external services, over their public HTTP APIs only."""
