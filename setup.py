# SPDX-License-Identifier: Apache-2.0
"""Everything about the package is said in setup.cfg."""
from setuptools import setup

setup()
