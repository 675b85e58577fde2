# SPDX-License-Identifier: Apache-2.0
"""Moves of guests between hosts, while they are off or while they run."""
