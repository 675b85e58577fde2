# SPDX-License-Identifier: Apache-2.0
"""The ring ``install``: Debian 12 machines, booted as containers, on which the documentation's own
commands install Kilonova beside real Keystone, Glance and Neutron."""
