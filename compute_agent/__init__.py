# SPDX-License-Identifier: Apache-2.0
"""Does what it is told, repeatably: the process that drives the hypervisor of one host."""
