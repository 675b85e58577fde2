# SPDX-License-Identifier: Apache-2.0
"""The parts of a cloud that belong to the machine: namespaces, libvirtd, the supervisor."""
