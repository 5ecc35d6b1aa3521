#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Training on several hosts is the training on one host, and sends the bytes of the formula."""

import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import host_traffic
import simulated_hosts
import training_job

# Headers of frames and acknowledgements, and control messages, are 1 % of these rows.
OVERHEAD = 1.04


class Run:
    """A training of `steps` steps on hosts, with its log and what each host has sent."""

    def __init__(self, hosts, ranks_per_host, steps, *arguments, rate="none"):
        folder = training_job.new_folder()
        with simulated_hosts.SimulatedHosts(hosts, ranks_per_host, rate) as simulated:
            start = time.monotonic()
            command = [*training_job.command(folder, steps), *arguments]
            job = simulated.start(command, folder)
            ended = job.wait(timeout=60, grace=5)
            self.seconds = time.monotonic() - start
            self.sent = simulated.bytes_sent()
        if not (ended and job.succeeded()):
            raise AssertionError(job.failures())
        self.log = training_job.log(folder)


class HostsTest(unittest.TestCase):
    def check_shape(self, hosts, ranks_per_host):
        """Returns a run of six steps."""
        short, long = (Run(hosts, ranks_per_host, steps) for steps in (2, 6))
        alone = training_job.train_on_one_rank(6)
        self.assertEqual(len(long.log), 6)
        for ours, theirs in zip(long.log, alone, strict=True):
            # Another exchange may add in another order.
            self.assertLess(abs(ours["loss"] / theirs["loss"] - 1), 1e-5, (ours, theirs))
        parameters = long.log[-1]["memory"]["working_parameters"]
        shape = hosts, ranks_per_host, parameters, parameters
        for host in range(hosts):
            # All that is not part of a step is in both, but for retries at the start.
            measured = (long.sent[host] - short.sent[host]) / 4
            expected = host_traffic.expected_bytes(*shape)
            about = (f"{hosts} hosts of {ranks_per_host}: host {host} sends {measured:.0f} bytes a "
                     f"step, {measured / expected:.4f} of the formula")
            print(about, flush=True)
            self.assertGreaterEqual(measured, 0.98 * host_traffic.two_level_bytes(*shape), about)
            self.assertLessEqual(measured, OVERHEAD * host_traffic.flat_bytes(*shape), about)
            self.assertAlmostEqual(measured / expected, 1, delta=OVERHEAD - 1, msg=about)
        return long

    def test_two_hosts_of_one_rank(self):
        self.check_shape(2, 1)

    def test_two_hosts_of_two_ranks(self):
        """Also changes of rows alone: without loss, and with less on the link."""
        whole = self.check_shape(2, 2)
        changes = Run(2, 2, 6, "--gather-wire", "changes")
        self.assertEqual([step["loss"] for step in whole.log],
                         [step["loss"] for step in changes.log])
        for host in range(2):
            ratio = changes.sent[host] / whole.sent[host]
            about = f"2 hosts of 2: host {host} sends {ratio:.3f} of the bytes"
            print(about, flush=True)
            # Half of the bytes are gradients.
            self.assertLess(ratio, 0.92, about)

    def test_three_hosts_of_one_rank(self):
        self.check_shape(3, 1)

    def test_any_number_of_hosts_trains_the_bits_of_one_rank(self):
        options = ("--same-bits", "--dropout", "0.1")
        alone = training_job.train_on_one_rank(6, *options)
        self.assertIn("masters_hash", alone[-1])
        bits = [(step["loss"], step["gradient_norm"], step.get("masters_hash")) for step in alone]
        for hosts, ranks_per_host in ((2, 2), (3, 1)):
            steps = Run(hosts, ranks_per_host, 6, *options).log
            self.assertEqual([(step["loss"], step["gradient_norm"], step.get("masters_hash"))
                              for step in steps], bits, f"{hosts} hosts of {ranks_per_host}")

    def test_a_link_is_no_faster_than_its_rate(self):
        run = Run(2, 1, 6, rate="100mbit")
        burst = 512 * 1024
        self.assertGreater(run.seconds, (max(run.sent) - burst) / (100e6 / 8))

    def run_on_own_disks(self, folder, turn, *arguments):
        """The steps logged by 2 hosts of 2 ranks; host h works in the folder of disk h + `turn`."""
        logs = training_job.new_folder()
        script = f'disk=$0/disk-$(((GROUP_RANK + {turn}) % 2)); mkdir -p $disk; cd $disk; exec "$@"'
        command = [*training_job.command(logs, 6), "--checkpoints", "run", "--save-every", "2",
                   "--own-disks", *arguments]
        with simulated_hosts.SimulatedHosts(2, 2) as simulated:
            job = simulated.start(["sh", "-c", script, folder, *command], logs)
            ended = job.wait(timeout=60, grace=5)
        self.assertTrue(ended and job.succeeded(), job.failures())
        return training_job.log(logs)

    def test_each_host_saves_to_its_own_disk(self):
        folder = training_job.new_folder()
        whole = self.run_on_own_disks(folder, 0, "--keep", "2")
        for disk, ranks in ((0, (0, 1)), (1, (2, 3))):
            run = folder / f"disk-{disk}" / "run"
            self.assertEqual(sorted(path.name for path in run.iterdir()), ["step-4", "step-6"])
            shards = sorted(path.name for path in (run / "step-4").glob("rank-*"))
            self.assertEqual(shards, [f"rank-{rank:05}.safetensors" for rank in ranks])
        # As after a crash: one disk lacks the newest.
        shutil.rmtree(folder / "disk-1" / "run" / "step-6")
        for turn in (0, 1):
            resumed = self.run_on_own_disks(folder, turn, "--keep", "3", "--resume")
            self.assertEqual([step["loss"] for step in resumed],
                             [step["loss"] for step in whole[4:]], f"disks turned by {turn}")
            # The repeated step has a name of its own where a disk has half a checkpoint of it.
            for disk in (0, 1):
                run = folder / f"disk-{disk}" / "run"
                self.assertTrue((run / ("step-6" if turn else "step-6-2")).is_dir())
                for path in run.glob("step-6*"):
                    shutil.rmtree(path)

    def test_a_killed_runner_leaves_nothing(self):
        runner = Path(simulated_hosts.__file__).resolve()
        # An argument that no other process of this machine has.
        sleep = ["sleep", f"{1000 + time.time():.6f}"]
        job = subprocess.Popen([sys.executable, "-B", runner, "--hosts", "2", "--", *sleep])
        try:
            self.assertTrue(within(20, lambda: processes(sleep) == 2))
        finally:
            job.send_signal(signal.SIGKILL)
            job.wait()
        self.assertTrue(within(20, lambda: processes(sleep) == 0))


def processes(command):
    """How many processes run `command`."""
    wanted = b"\0".join(word.encode() for word in command) + b"\0"
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == wanted
        except OSError:
            pass  # It has ended.
    return count


def within(seconds, condition):
    """Whether `condition` becomes true in that time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


if __name__ == "__main__":
    training_job.skip_unless_available()
    unittest.main(testRunner=training_job.TwoAtOnce)
