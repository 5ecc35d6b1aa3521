#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of train_gpt under torchrun."""

import unittest

import launched_job
import torchrun
from launcher_contract import LauncherContract


class TorchrunTest(LauncherContract, unittest.TestCase):
    python = None

    def command(self, trainer):
        return [*torchrun.agent(self.python, "--standalone", "--nproc-per-node",
                                str(launched_job.RANKS)), *trainer]

    # torchrun itself always ends with 1, and reports the code of the rank that failed first.
    def check_exit_code_of_ranks(self, expected, status, text):
        self.assertEqual(status, 1, text)
        self.assertRegex(text, rf"exitcode *: {expected}\b")


if __name__ == "__main__":
    TorchrunTest.python = torchrun.python_with_torch()
    if TorchrunTest.python is None:
        launched_job.skip("no Python with torch.distributed.run; set ZERO_PYTHON to one")
    launched_job.run_cases_at_once(TorchrunTest)
