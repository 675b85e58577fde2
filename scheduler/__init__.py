# SPDX-License-Identifier: Apache-2.0
"""The scheduler: which hosts, in which order, and why not the others. It proposes and never
claims."""
