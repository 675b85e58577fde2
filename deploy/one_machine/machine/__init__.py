# SPDX-License-Identifier: Apache-2.0
"""The machine below a cloud: namespaces, libvirtd, the supervisor."""
