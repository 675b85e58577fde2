# SPDX-License-Identifier: Apache-2.0
"""The network agent, which makes the networks of a host's guests."""
