# SPDX-License-Identifier: Apache-2.0
"""How files of moving servers travel: the agent that has them serves, the agent that wants them
reads."""
