# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""A SLURM cluster of this machine alone, for as long as a test needs it.

munged, slurmctld and slurmd run as the user of the test, in a new folder, with ports of their own:
a SLURM that the machine may have is neither used nor changed.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

# Debian puts daemons where the PATH of a user does not lead.
SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "scancel", "sinfo")

CONFIGURATION = """\
ClusterName=zero
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=10
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing_program():
    """The first program that is not installed, or None."""
    return next((name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None), None)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class SlurmNode:
    """A context manager; `environment` makes srun and scancel use this cluster."""

    def __init__(self, cpus):
        # Short, since the path of a socket has 107 characters at most.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm.", dir="/tmp"))
        self.environment = dict(os.environ, PATH=SEARCH, SLURM_CONF=f"{self.folder}/slurm.conf")
        self.daemons = []
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=socket.gethostname().split(".")[0], controller_port=free_port(),
            node_port=free_port(), user=getpass.getuser(), folder=self.folder, cpus=cpus))

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command):
        return subprocess.run(command, env=self.environment, capture_output=True, text=True,
                              timeout=120)

    def _start(self):
        folder = self.folder
        # --force: the folder above, /tmp, can be written by all, which munged refuses otherwise.
        self._daemon("munged", "--foreground", "--force", f"--socket={folder}/munge.socket",
                     f"--key-file={folder}/munge.key", f"--pid-file={folder}/munged.pid",
                     f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
                     "--num-threads=2")
        self._wait_until(lambda: (folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D")
        self._daemon("slurmd", "-D")
        self._wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "-o", "%T").stdout)

    def _daemon(self, name, *arguments):
        with open(self.folder / f"{name}.out", "w") as out:
            self.daemons.append(subprocess.Popen(
                [shutil.which(name, path=SEARCH), *arguments], env=self.environment, stdout=out,
                stderr=subprocess.STDOUT))

    def _wait_until(self, condition):
        deadline = time.monotonic() + 120
        while not condition():
            if time.monotonic() > deadline or any(d.poll() is not None for d in self.daemons):
                outputs = [f"{p.name}:\n{p.read_text()[-2000:]}"
                           for p in sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])]
                raise AssertionError("SLURM does not start\n" + "\n".join(outputs))
            time.sleep(0.1)
