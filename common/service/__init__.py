# SPDX-License-Identifier: Apache-2.0
"""The base of every process: configuration, logging, metrics, traces, reload."""
