#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a link while ranks train, either all of them complete the training, or all of
them end within the timeout and a second, with errors that name a rank that they do not reach."""

import concurrent.futures
import contextlib
import dataclasses
import os
import re
import socket
import time
import unittest
from pathlib import Path

import simulated_hosts
import training_job

TIMEOUT = 3
# The promise, and what the ranks compute. LostTime has the other programs on these cores.
LIMIT = TIMEOUT + 1 + 1.5
# Of jobs that complete: longer than any of them is late on a busy machine.
LONG_TIMEOUT = 30
# A rank that reaches a core late may miss the others before they train.
TRIES = 5
# A step sends 340 kB from each of two hosts, which takes 0.14 s.
RATE = "20mbit"
FOREVER = 100000


@dataclasses.dataclass
class Case:
    """Training in which links change, in [(seconds since the first change, what, arguments)]."""

    changes: list
    # Pairs of hosts, the lower one first, that do not reach each other any more.
    apart: set
    hosts: int = 2
    ranks_per_host: int = 1
    rate: str = RATE
    steps: int = FOREVER
    timeout: int = TIMEOUT

    def missing(self, rank):
        """The ranks that `rank` may name: on hosts that its host, or else any, does not reach."""
        host = rank // self.ranks_per_host
        pairs = [pair for pair in self.apart if host in pair] or self.apart
        hosts = {other for pair in pairs for other in pair} - {host}
        return {other for other in range(self.hosts * self.ranks_per_host)
                if other // self.ranks_per_host in hosts}


@dataclasses.dataclass
class Ended:
    status: int
    seconds: float  # since the first change
    lost: float  # how many of them it may have waited for other programs
    errors: str

    def named(self):
        """The ranks that it did not reach, or that others had reported to it."""
        found = re.findall(r"ranks? ([\d, ]+) did not|lost rank (\d+)", self.errors)
        return {int(rank) for pair in found for rank in re.findall(r"\d+", " ".join(pair))}


class LostTime:
    """How long threads of a job and of this test have waited for a core since the first look.

    No rank ends later than that because of other programs: at any time one thread holds it up.
    """

    def __init__(self, job):
        self.job = job
        self.before = self._waits()
        self.stolen_before = stolen_seconds()
        self.now = dict(self.before)

    def _waits(self):
        """By thread, in nanoseconds."""
        waits = {}
        processes = [os.getpid()] + [rank.process.pid for rank in self.job.ranks]
        while processes:
            process = processes.pop()
            # Threads end at any time. A kernel may have no such files: then no time is lost.
            with contextlib.suppress(OSError):
                for thread in os.listdir(f"/proc/{process}/task"):
                    folder = Path(f"/proc/{process}/task/{thread}")
                    with contextlib.suppress(OSError):
                        waits[thread] = int((folder / "schedstat").read_text().split()[1])
                        if process != os.getpid():
                            processes += (folder / "children").read_text().split()
        return waits

    def look(self):
        self.now.update(self._waits())

    def seconds(self):
        waited = sum(wait - self.before.get(thread, 0) for thread, wait in self.now.items())
        return waited / 1e9 + stolen_seconds() - self.stolen_before


def stolen_seconds():
    """What the host of a virtual machine has taken from its cores, all together."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def run(case):
    """How each rank ended."""
    for _ in range(TRIES):
        ended = run_once(case)
        if ended is not None:
            return ended
    raise AssertionError(f"{case}: no job has trained three steps")


def run_once(case):
    """The same; None if a rank has ended before the first change."""
    folder = training_job.new_folder()
    hosts, ranks = case.hosts, case.ranks_per_host
    with simulated_hosts.SimulatedHosts(hosts, ranks, case.rate) as simulated:
        command = training_job.command(folder, case.steps, layers=1, width=64)
        job = simulated.start(command, folder, {"ZERO_TIMEOUT": f"{case.timeout}s"})
        while len(training_job.log(folder)) < 3:
            if job.wait(0.05):
                return None
        (_, change, *arguments), *later = case.changes
        getattr(simulated, change)(*arguments)
        start = time.monotonic()
        for rank in job.ranks:
            rank.poll()
        if any(rank.ended for rank in job.ranks):
            return None
        lost = LostTime(job)
        lost_of = {}  # by rank that has ended

        def wait_until(reached):
            while not reached() and time.monotonic() < start + 60 + lost.seconds():
                all_ended = job.wait(0.05)
                lost.look()
                for rank in job.ranks:
                    if rank.ended:
                        lost_of.setdefault(rank.number, lost.seconds())
                if all_ended:
                    return

        for seconds, change, *arguments in later:
            wait_until(lambda: time.monotonic() >= start + seconds)
            if seconds > case.timeout:  # on a busy machine, also after that of a rank
                wait_until(lambda: any(rank.ended for rank in job.ranks))
            getattr(simulated, change)(*arguments)
        wait_until(lambda: False)
    ended = []
    for rank in job.ranks:
        seconds = rank.ended - start if rank.ended else float("inf")
        ended.append(Ended(rank.status, seconds, lost_of.get(rank.number, 0),
                           rank.errors.read_text(errors="replace")))
    return ended


def run_all(cases):
    """All at once: what takes time is waiting."""
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        return list(zip(cases, pool.map(run, cases)))


def names_missing(case, ended, rank, asked=()):
    """Whether `rank` names one that it cannot reach, or one that ended first and does."""
    named = ended[rank].named()
    return bool(named & case.missing(rank)) or any(
        names_missing(case, ended, other, (*asked, rank)) for other in named - {rank, *asked})


class HostsFaultTest(unittest.TestCase):
    def expect_errors(self, *cases, limit=LIMIT):
        for case, ended in run_all(cases):
            for rank, end in enumerate(ended):
                about = (f"{case}, rank {rank} after {end.seconds:.2f} s, of which it may have "
                         f"waited {end.lost:.2f} s for a core: {end.errors}")
                self.assertEqual(end.status, 1, about)
                self.assertTrue(names_missing(case, ended, rank), about)
                self.assertLess(end.seconds, limit + end.lost, about)

    def expect_completed(self, *cases):
        for case, ended in run_all(cases):
            for rank, end in enumerate(ended):
                self.assertEqual(end.status, 0, f"{case}, rank {rank}: {end.errors}")
                self.assertGreater(end.seconds, case.changes[-1][0], "before the last change")

    def test_a_link_that_goes_down(self):
        self.expect_errors(
            Case([(0, "set_up", 1, False)], {(0, 1)}),
            Case([(0, "set_up", 0, False)], {(0, 1), (0, 2)}, hosts=3),
            Case([(0, "set_up", 1, False)], {(0, 1)}, ranks_per_host=2))

    def test_a_link_that_works_in_one_direction_only(self):
        self.expect_errors(
            Case([(0, "drop_frames_to", 0)], {(0, 1)}),
            Case([(0, "drop_frames_to", 2)], {(0, 2), (1, 2)}, hosts=3),
            Case([(0, "drop_frames_to", 1)], {(0, 1)}, ranks_per_host=2))

    def test_two_hosts_that_only_a_third_one_reaches(self):
        self.expect_errors(Case([(0, "separate", 1, 2)], {(1, 2)}, hosts=3))

    def test_a_link_that_is_back_after_the_timeout(self):
        late = TIMEOUT + 0.5
        self.expect_errors(
            Case([(0, "set_up", 1, False), (late, "set_up", 1, True)], {(0, 1)}),
            Case([(0, "set_up", 0, False), (late, "set_up", 0, True)], {(0, 1), (0, 2)}, hosts=3))

    def test_a_link_that_is_back_before_the_timeout(self):
        soon = 0.75
        self.expect_completed(
            Case([(0, "set_up", 1, False), (soon, "set_up", 1, True)], set(), steps=30,
                 timeout=LONG_TIMEOUT),
            Case([(0, "set_up", 0, False), (soon, "set_up", 0, True)], set(), hosts=3, steps=30,
                 timeout=LONG_TIMEOUT))

    def test_a_link_that_is_slower_than_the_others(self):
        self.expect_completed(
            Case([(0, "set_rate", 1, "10mbit")], set(), rate="200mbit", steps=15,
                 timeout=LONG_TIMEOUT),
            Case([(0, "set_rate", 0, "10mbit")], set(), hosts=3, rate="200mbit", steps=15,
                 timeout=LONG_TIMEOUT))

    def test_addresses_that_other_hosts_cannot_use_are_told_so_at_once(self):
        network = simulated_hosts.NETWORK
        # As of Debian, whose machines have their names at a loopback address, and of two families.
        for addresses in (["127.0.1.1", "127.0.1.1"], [network + "1", "fd77::2"]):
            folder = training_job.new_folder()
            for host, address in enumerate(addresses):
                (folder / f"hosts-{host}").write_text(f"{address} {socket.gethostname()}\n")
            script = 'mount --bind "$0/hosts-$GROUP_RANK" /etc/hosts && exec "$@"'
            command = ["sh", "-c", script, folder, *training_job.command(folder, 1)]
            with simulated_hosts.SimulatedHosts(2, 1) as simulated:
                simulated.hosts[1].call("ip", "address", "add", "fd77::2/64", "nodad", "dev",
                                        simulated_hosts.INTERFACE)
                job = simulated.start(command, folder, {
                    "GLOO_SOCKET_IFNAME": "", "ZERO_TIMEOUT": f"{2 * LONG_TIMEOUT}s"})
                self.assertTrue(job.wait(LONG_TIMEOUT), f"{addresses}: {job.failures()}")
            for rank in job.ranks:
                self.assertEqual(rank.status, 1, addresses)
                errors = rank.errors.read_text(errors="replace")
                self.assertIn("Gloo listens at", errors)
                self.assertIn("set GLOO_SOCKET_IFNAME on each", errors)

    def test_a_link_that_is_too_slow_for_the_timeout(self):
        # An exchange takes 5 s. Those that are short may succeed before, each in its own time.
        self.expect_errors(
            Case([(0, "set_rate", 1, "128kbit")], {(0, 1)}),
            Case([(0, "set_rate", 1, "128kbit")], {(0, 1), (0, 2), (1, 2)}, hosts=3),
            limit=2 * LIMIT)


if __name__ == "__main__":
    training_job.skip_unless_available()
    unittest.main(testRunner=training_job.TwoAtOnce)
