# SPDX-License-Identifier: Apache-2.0
"""Images for guests. Each folder has a script ``build OUTPUT.qcow2``, and boot_disk is shared."""
