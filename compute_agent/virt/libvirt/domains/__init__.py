# SPDX-License-Identifier: Apache-2.0
"""The connection to libvirt, and operations on one domain."""
