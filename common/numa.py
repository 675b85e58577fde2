# SPDX-License-Identifier: Apache-2.0
"""Which parts of a host a guest gets: NUMA cells, CPUs of its own, huge pages, PCI devices.

Pure. The scheduler asks it whether a guest would fit, the claim where it goes: the same function on the same facts, so
that what is proposed can be claimed.
"""
