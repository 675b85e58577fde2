# SPDX-License-Identifier: Apache-2.0
"""Code that the services share: rules, records, the database and messages."""

__version__ = "0.1.0"  #: The version of the distribution, which setup.cfg reads.
