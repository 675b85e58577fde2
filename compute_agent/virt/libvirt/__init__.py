# SPDX-License-Identifier: Apache-2.0
"""QEMU and KVM through libvirt."""
