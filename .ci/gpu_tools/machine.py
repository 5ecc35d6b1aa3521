# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The facts of a machine that a report has to give."""

import datetime
import os
import shutil
import subprocess
import sys


def find_tool(name):
    """A program on PATH or of the CUDA toolkit, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(name) or shutil.which(name, path=f"{home}/bin")


def _output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


_TORCH = """
import torch
print(torch.__version__)
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")
print(torch.cuda.device_count())
print(".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "")
"""


def _torch():
    lines = [*_output(sys.executable, "-c", _TORCH).split("\n"), "", "", "", ""]
    return {"torch": lines[0], "gpu": lines[1], "gpus": int(lines[2] or 0), "nccl": lines[3]}


def _processor():
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return ""


def facts():
    """Of this machine, by name; "gpu" is "" where torch sees none."""
    version = _output(find_tool("nvcc") or "nvcc", "--version").split("release ")
    return {
        **_torch(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "nvcc": version[1].split(",")[0] if len(version) > 1 else "",
        "compute-sanitizer": bool(find_tool("compute-sanitizer")),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
    }
