# SPDX-License-Identifier: Apache-2.0
"""Verbs on a guest that stays on this host."""
