# SPDX-License-Identifier: Apache-2.0
"""Requests that no client should send, made by chance from a seed, and what no answer to one may
be."""
