#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Whole jobs of train_gpt under the mpirun of OpenMPI, and under Hydra, that of MPICH and Intel MPI."""

import os
import shutil
import subprocess
import unittest

import launched_job
from launcher_contract import LauncherContract


def open_mpi():
    """Its mpirun, which where both are installed may have another name; None where it is not."""
    for name in ("mpirun.openmpi", "mpirun"):
        if shutil.which(name) and "Open MPI" in subprocess.run(
                [name, "--version"], capture_output=True, text=True, check=False).stdout:
            return name
    return None


@unittest.skipUnless(open_mpi(), "no mpirun of OpenMPI (apt-get install openmpi-bin)")
class OpenMpiTest(LauncherContract, unittest.TestCase):
    def command(self, trainer):
        as_root = [] if os.geteuid() else ["--allow-run-as-root"]
        return [open_mpi(), *as_root, "--oversubscribe", "--bind-to", "none", "-n",
                str(launched_job.RANKS), *trainer]


@unittest.skipUnless(shutil.which("mpiexec.hydra"), "no mpiexec.hydra (apt-get install mpich)")
class HydraTest(LauncherContract, unittest.TestCase):
    def command(self, trainer):
        return ["mpiexec.hydra", "-n", str(launched_job.RANKS), *trainer]


if __name__ == "__main__":
    unittest.main(verbosity=2)
