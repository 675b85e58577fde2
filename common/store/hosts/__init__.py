# SPDX-License-Identifier: Apache-2.0
"""Hosts: their rows and sessions, the services on them, the aggregates and zones that they are
in."""
