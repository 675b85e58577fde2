# SPDX-License-Identifier: Apache-2.0
"""The agent, which drives the hypervisor of one host by repeatable commands of conductors."""
