# SPDX-License-Identifier: Apache-2.0
"""Rows of the store as handlers and views read them."""

from __future__ import annotations

from typing import Any

from common.store.engine import Row

#: A row of one statement: its columns are attributes, whose types the store's tables have.
StoreRow = Row[Any]
