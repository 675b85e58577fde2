# SPDX-License-Identifier: Apache-2.0
"""What ./deploy/test is made of: the table of its jobs and sets (plan), and how jobs run side by
side (jobs)."""
