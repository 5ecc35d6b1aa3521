#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of train_gpt under OpenMPI's mpirun."""

import os
import shutil
import unittest

import launched_job
from launcher_contract import LauncherContract


class MpirunTest(LauncherContract, unittest.TestCase):
    def command(self, trainer):
        as_root = [] if os.geteuid() else ["--allow-run-as-root"]
        return ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-n",
                str(launched_job.RANKS), *trainer]


if __name__ == "__main__":
    if shutil.which("mpirun") is None:
        launched_job.skip("mpirun is not installed (apt-get install openmpi-bin)")
    unittest.main(verbosity=2)
