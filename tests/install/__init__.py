# SPDX-License-Identifier: Apache-2.0
"""The ring ``install``: Debian machines, booted as containers.

On these machines the commands of the documentation install Kilonova beside Keystone, Glance and
Neutron.
"""
