# SPDX-License-Identifier: Apache-2.0
"""The virt driver interface and its implementations."""
