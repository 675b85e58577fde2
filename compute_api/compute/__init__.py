# SPDX-License-Identifier: Apache-2.0
"""The compute service: the OpenStack Compute API, v2.1 with its microversions."""
