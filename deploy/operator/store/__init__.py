# SPDX-License-Identifier: Apache-2.0
"""Database work of the operator's commands alone: purge, adoption, stuck actions."""
