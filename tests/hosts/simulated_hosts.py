#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Runs a program on several hosts of several ranks each, all of them on this machine.

  python3 tests/hosts/simulated_hosts.py --hosts 2 --ranks 2 --rate 1gbit --output ranks -- \\
      .bazel/bin/examples/train_gpt/train_gpt --steps 20

A host is a network namespace and a PID namespace, so that ranks of different hosts share no memory.
A link joins its interface eth0 to a switch, a bridge in one more namespace; a rate limits every
link in each direction. Ranks have torchrun's variables. Namespaces have no names, and each exists
as long as a `cat` in it, which reads a pipe of this process: any number of runs can be under way at
a time, and a run that ends in any way, also by SIGKILL, leaves nothing. Linux, with util-linux and
iproute2; as root, or as any user where the kernel permits user namespaces.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INTERFACE = "eth0"
NETWORK = "10.77.0."
# Namespaces are new, so no other program can have this port.
PORT = 29500
# Administrators' programs are in folders that the PATH of other users lacks.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
TOOLS = ("unshare", "nsenter", "ip", "tc", "cat")
# Root needs no user namespace, and in one it could not read the files of others.
IS_ROOT = os.geteuid() == 0
NEW_USER = [] if IS_ROOT else ["--user", "--map-root-user"]
ENTER_USER = [] if IS_ROOT else ["--user", "--preserve-credentials"]


class Unavailable(Exception):
    """A namespace, a link or a limit that this system does not make, and why."""


def tool(name):
    path = shutil.which(name, path=PATH)
    if path is None:
        raise Unavailable(f"{name} is not installed")
    return path


def unavailable():
    """The reason why hosts cannot be simulated here; None where they can."""
    try:
        for name in TOOLS:
            tool(name)
        with SimulatedHosts(2, 1, "1gbit"):
            return None
    except Unavailable as reason:
        return str(reason)


class Namespaces:
    """New namespaces, until close() or until this process ends."""

    def __init__(self, *kinds, within=None):
        entry = within.entry(*ENTER_USER) if within else []
        self.holder = subprocess.Popen([*entry, tool("unshare"), *kinds, tool("cat")],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       stderr=subprocess.PIPE)
        self.pid = self.holder.pid
        # The echo shows that the namespaces exist.
        with contextlib.suppress(BrokenPipeError):
            self.holder.stdin.write(b"ready\n")
            self.holder.stdin.flush()
        if self.holder.stdout.readline() != b"ready\n":
            error = self.holder.communicate()[1].decode().strip()
            raise Unavailable(error or "unshare makes no namespaces")

    def entry(self, *kinds):
        """The beginning of a command that runs the rest of it in these namespaces."""
        return [tool("nsenter"), f"--target={self.pid}", *kinds]

    def call(self, name, *arguments, script=""):
        """Runs an administrator's program in these namespaces."""
        command = [*self.entry(*ENTER_USER, "--net"), tool(name), *arguments]
        done = subprocess.run(command, input=script, capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()} {script.strip()}")

    def close(self):
        # Without its pipe the `cat` ends, and with the first process of a PID namespace all others.
        for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            pipe.close()
        self.holder.wait()


class Rank:
    def __init__(self, command, environment, folder):
        self.number = int(environment["RANK"])
        self.output = Path(folder) / f"rank-{self.number}.out"
        self.errors = Path(folder) / f"rank-{self.number}.err"
        with open(self.output, "wb") as output, open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(command, env=dict(os.environ, **environment),
                                            stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        self.ended = None  # time.monotonic() of its end, good to 20 ms

    @property
    def status(self):
        """Its exit status, of a signal minus its number; None while it runs."""
        return self.process.returncode

    def poll(self):
        if self.ended is None and self.process.poll() is not None:
            self.ended = time.monotonic()

    def last_errors(self, lines=3):
        return "\n".join(self.errors.read_text(errors="replace").splitlines()[-lines:])


class Job:
    """The ranks of one program."""

    def __init__(self, ranks):
        self.ranks = ranks

    def wait(self, timeout, grace=None):
        """Waits for all ranks, after a failure `grace` seconds more. Returns whether all ended."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            for rank in self.ranks:
                rank.poll()
            if all(rank.ended for rank in self.ranks):
                return True
            if grace is not None and any(rank.status for rank in self.ranks):
                end, grace = min(end, time.monotonic() + grace), None
            time.sleep(0.02)
        return False

    def succeeded(self):
        return all(rank.status == 0 for rank in self.ranks)

    def failures(self):
        """The ends of what failed ranks and those that still run have said, as text."""
        return "\n".join(f"rank {rank.number}, exit status {rank.status}: {rank.last_errors()}"
                         for rank in self.ranks if rank.status != 0)


class SimulatedHosts:
    """Hosts 0 to hosts - 1 and their links, for use in a `with` statement."""

    def __init__(self, hosts, ranks_per_host, rate="none"):
        self.ranks_per_host = ranks_per_host
        self.closing = contextlib.ExitStack()
        self.hosts = []
        with self.closing:
            self.switch = self._make(*NEW_USER, "--net")
            self.switch.call("ip", "-batch", "-",
                             script="link add bridge type bridge\nlink set bridge up\n")
            for host in range(hosts):
                self.hosts.append(self._make("--net", "--pid", "--fork", "--kill-child",
                                             "--mount-proc", within=self.switch))
                self._plug_in(host)
                self.set_rate(host, rate)
            self.closing = self.closing.pop_all()

    def _make(self, *kinds, within=None):
        made = Namespaces(*kinds, within=within)
        self.closing.callback(made.close)
        return made

    def _plug_in(self, host):
        self.switch.call("ip", "-batch", "-", script=f"""
            link add port{host} type veth peer name {INTERFACE} netns {self.hosts[host].pid}
            link set port{host} master bridge up""")
        self.hosts[host].call("ip", "-batch", "-", script=f"""
            link set lo up
            address add {NETWORK}{host + 1}/24 dev {INTERFACE}
            link set {INTERFACE} up""")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closing.close()

    def start(self, command, folder, environment=None):
        """Starts `command` on every rank. Their outputs are files in `folder`."""
        world = len(self.hosts) * self.ranks_per_host
        shared = dict(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(self.ranks_per_host),
                      MASTER_ADDR=NETWORK + "1", MASTER_PORT=str(PORT),
                      GLOO_SOCKET_IFNAME=INTERFACE, OMP_NUM_THREADS="1")
        shared.update(environment or {})
        ranks = []
        for rank in range(world):
            host, local = divmod(rank, self.ranks_per_host)
            # The holder itself is outside of the PID namespace that it has made.
            entry = self.hosts[host].entry(
                *ENTER_USER, "--net", "--mount", "--wd",
                f"--pid=/proc/{self.hosts[host].pid}/ns/pid_for_children")
            own = dict(shared, RANK=str(rank), LOCAL_RANK=str(local), GROUP_RANK=str(host))
            ranks.append(Rank([*entry, "--", *map(str, command)], own, folder))
        return Job(ranks)

    def bytes_sent(self):
        """What each host's interface has sent until now, with the headers of frames."""
        return [interface_bytes(INTERFACE, host.pid) for host in self.hosts]

    # ---- Changes of a link, at any time ----

    def set_rate(self, host, rate):
        """Limits the link of `host` in each direction, as tc writes rates; "none": no limit."""
        for end in self._ends(host):
            self._limit(*end, rate)

    def set_up(self, host, up):
        """Switches the interface of `host` on or off."""
        self.hosts[host].call("ip", "link", "set", INTERFACE, "up" if up else "down")

    def separate(self, one, other):
        """From now on two hosts send each other nothing; both still reach the rest."""
        for host, address in ((one, other), (other, one)):
            self.hosts[host].call("ip", "route", "add", "blackhole", f"{NETWORK}{address + 1}")

    def drop_frames_to(self, host):
        """From now on `host` receives no TCP, but what it sends arrives."""
        # A queue that is shorter than any segment drops all of them.
        self.switch.call("tc", "qdisc", "replace", "dev", f"port{host}", "root", "tbf",
                         "rate", "1kbit", "burst", "64", "limit", "64")

    def _ends(self, host):
        return (self.hosts[host], INTERFACE), (self.switch, f"port{host}")

    @staticmethod
    def _limit(namespaces, interface, rate):
        queue = ["noqueue"] if rate == "none" else ["tbf", "rate", rate, "burst", "512k",
                                                    "latency", "100ms"]
        namespaces.call("tc", "qdisc", "replace", "dev", interface, "root", *queue)


def interface_bytes(interface, pid="self"):
    """What an interface has sent, of the network namespace of process `pid`."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[8])
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each host")
    parser.add_argument("--rate", default="none", help="of a link, such as 1gbit; none: no limit")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for the program")
    parser.add_argument("--output", help="folder for rank-<n>.out and rank-<n>.err; default: none")
    parser.add_argument("command", nargs="+", help="the program and its arguments, after --")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.output or stack.enter_context(tempfile.TemporaryDirectory())
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            hosts = stack.enter_context(SimulatedHosts(args.hosts, args.ranks, args.rate))
        except Unavailable as reason:
            sys.exit(f"hosts cannot be simulated here: {reason}")
        job = hosts.start(args.command, folder)
        ended = job.wait(args.timeout, grace=60)
        sys.stdout.write(job.ranks[0].output.read_text(errors="replace"))
        for host, sent in enumerate(hosts.bytes_sent()):
            print(f"host {host} sent {sent} bytes", file=sys.stderr)
        if not (ended and job.succeeded()):
            sys.exit(job.failures())


if __name__ == "__main__":
    main()
