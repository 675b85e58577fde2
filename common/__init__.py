# SPDX-License-Identifier: Apache-2.0
"""Code that the services share: rules, records, the database and messages."""

__version__ = "0.2.0.dev0"  #: The version of the distribution, which setup.cfg reads.
