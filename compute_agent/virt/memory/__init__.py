# SPDX-License-Identifier: Apache-2.0
"""A hypervisor in memory: the second implementation of ``virt.driver``, for tests and benches. No
guest really runs."""
