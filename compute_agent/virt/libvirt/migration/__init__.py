# SPDX-License-Identifier: Apache-2.0
"""Guests that move between hosts: off, running, and arriving."""
