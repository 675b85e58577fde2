# SPDX-License-Identifier: Apache-2.0
"""Notifications that wait to be sent, and the usage audit that writes some."""
