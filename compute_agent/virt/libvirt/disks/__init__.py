# SPDX-License-Identifier: Apache-2.0
"""Disks of servers, the images below them, and the image cache."""
