# SPDX-License-Identifier: Apache-2.0
"""A hypervisor in memory: the implementation of ``virt.driver`` for tests and benchmarks.

No guest really runs.
"""
