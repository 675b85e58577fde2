# SPDX-License-Identifier: Apache-2.0
"""Cinder itself as the neighbour: what the client of volumes says is said to it."""
