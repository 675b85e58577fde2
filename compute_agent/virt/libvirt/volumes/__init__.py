# SPDX-License-Identifier: Apache-2.0
"""Volumes of guests: connectors by protocol, secrets, copies."""
