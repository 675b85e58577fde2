# SPDX-License-Identifier: Apache-2.0
"""The operations of all HTTP services, and a world in this process to call them."""
