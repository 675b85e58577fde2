# SPDX-License-Identifier: Apache-2.0
"""Every operation of every HTTP service of ours, and a world in this process in which each can be
asked for."""
