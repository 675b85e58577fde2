# SPDX-License-Identifier: Apache-2.0
"""Connections of HTTP clients, so that no slow one costs a thread: docs/decisions/0031."""
