# SPDX-License-Identifier: Apache-2.0
"""Builds notifications from the rows of the outbox, and sends them."""
