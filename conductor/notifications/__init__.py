# SPDX-License-Identifier: Apache-2.0
"""Build notifications from the rows of the outbox, and send them."""
