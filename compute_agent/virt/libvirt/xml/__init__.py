# SPDX-License-Identifier: Apache-2.0
"""Definitions of domains as XML: built, read and changed. No I/O."""
