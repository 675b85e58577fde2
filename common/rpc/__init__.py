# SPDX-License-Identifier: Apache-2.0
"""Messages between processes: for each process, the interface it serves and the client that others use.

Messages wake; rows remember. Every cast may be lost, doubled or late, and nothing here retries.
"""
