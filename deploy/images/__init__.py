# SPDX-License-Identifier: Apache-2.0
"""The guests' images: each folder has a script ``build OUTPUT.qcow2``; what they share is in
boot_disk."""
