# SPDX-License-Identifier: Apache-2.0
"""Views of servers and of their parts."""
