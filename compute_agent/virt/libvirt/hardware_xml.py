# SPDX-License-Identifier: Apache-2.0
"""The hardware that flavor and image ask for, as libvirt's XML: pure functions, tested against golden files."""
from __future__ import annotations

#: What a guest's disks, interfaces and screen can be.
DISK_BUSES = ("virtio", "scsi", "sata", "ide", "usb")
VIF_MODELS = ("virtio", "e1000", "e1000e", "ne2k_pci", "pcnet", "rtl8139", "vmxnet3")
VIDEO_MODELS = ("vga", "cirrus", "vmvga", "qxl", "virtio", "bochs", "none")
