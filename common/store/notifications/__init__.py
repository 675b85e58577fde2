# SPDX-License-Identifier: Apache-2.0
"""The outbox of notifications, and the usage audit."""
