# SPDX-License-Identifier: Apache-2.0
"""Queries and changes that span hosts and servers."""
