# SPDX-License-Identifier: Apache-2.0
"""Hosts: their rows and sessions, services, aggregates and host actions."""
