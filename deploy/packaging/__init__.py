# SPDX-License-Identifier: Apache-2.0
"""Debian packages, man pages and completion."""
