# SPDX-License-Identifier: Apache-2.0
"""The placement service: Placement's API 1.0 to 1.39, on Kilonova's own tables."""
