# SPDX-License-Identifier: Apache-2.0
"""The frame of a process: configuration, logging, metrics, traces, reload."""
