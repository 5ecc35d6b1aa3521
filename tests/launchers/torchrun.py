# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The torchrun that tests use."""

import os
import re
import subprocess
from pathlib import Path

import launched_job


def _wheel_folders():
    """Virtual environments of the libtorch that the program is linked with, and beside it."""
    libraries = subprocess.run(["ldd", launched_job.PROGRAM], capture_output=True, text=True).stdout
    found = re.search(r"=> (/\S+)/lib/python3[^/]*/site-packages/torch/lib/libtorch_cpu", libraries)
    if found is None:
        return []
    environment = Path(found.group(1))
    return [environment, environment.with_name("libtorch-cuda")]


def python_with_torch():
    """A Python that can run torch.distributed.run, or None."""
    candidates = [os.environ.get("ZERO_PYTHON") or "python3",
                  *(str(folder / "bin/python3") for folder in _wheel_folders())]
    for python in candidates:
        try:
            probe = subprocess.run([python, "-c", "import torch.distributed.run"],
                                   capture_output=True, timeout=60)
        except OSError:
            continue
        if probe.returncode == 0:
            return python
    return None


def agent(python, *options):
    """The command line of torchrun, to which that of a rank is added."""
    return [python, "-W", "ignore", "-m", "torch.distributed.run", "--no-python", *options]
