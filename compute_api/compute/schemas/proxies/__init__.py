# SPDX-License-Identifier: Apache-2.0
"""Schemas of the deprecated resources of other services."""
