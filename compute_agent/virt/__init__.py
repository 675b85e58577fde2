# SPDX-License-Identifier: Apache-2.0
"""The virt driver interface and the implementations."""
