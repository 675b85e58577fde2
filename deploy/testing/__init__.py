# SPDX-License-Identifier: Apache-2.0
"""The parts of ./deploy/test: the table of jobs and sets (plan), and the parallel run of jobs
(jobs).
"""
