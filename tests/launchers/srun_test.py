#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of train_gpt under SLURM's srun, on a cluster that this test starts and stops."""

import os
import signal
import time
import unittest

import launched_job
import slurm_node
from launcher_contract import LauncherContract


class SrunTest(LauncherContract, unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.node = cls.enterClassContext(slurm_node.SlurmNode(cpus=launched_job.RANKS))
        cls.environment = cls.node.environment

    def command(self, trainer):
        return ["srun", "-n", str(launched_job.RANKS), *trainer]

    # SIGTERM to srun itself ends ranks at once; scancel sends it to the ranks, as the end of a time
    # limit does.
    def terminate(self, job):
        self.node.run("scancel", "--user", str(os.geteuid()))

    # srun asks for a second Ctrl-C, and then ends ranks without leaving them time to save.
    def test_ctrl_c_ends_all_ranks(self):
        with self.start_and_train(launched_job.new_folder()) as job:
            for _ in range(2):
                os.kill(job.process.pid, signal.SIGINT)
                time.sleep(0.2)
            self.assertNotEqual(job.wait(), 0, job.text())
            job.wait_for_ranks_to_end()


if __name__ == "__main__":
    missing = slurm_node.missing_program()
    if missing is not None:
        launched_job.skip(f"{missing} is not installed (apt-get install slurm-wlm munge)")
    unittest.main(verbosity=2)
