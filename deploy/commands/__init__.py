# SPDX-License-Identifier: Apache-2.0
"""The commands behind deploy/up, deploy/down and deploy/test."""
