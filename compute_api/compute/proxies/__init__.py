# SPDX-License-Identifier: Apache-2.0
"""Deprecated resources of other services, which the API requests with the caller's token."""
