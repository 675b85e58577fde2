# SPDX-License-Identifier: Apache-2.0
"""Malformed requests generated from a seed, and checks of the answers."""
