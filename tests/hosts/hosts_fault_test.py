#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a link while ranks train, either all of them complete the training, or all of
them end within the timeout and a second, with errors that name a rank that they do not reach."""

import concurrent.futures
import dataclasses
import re
import time
import unittest

import simulated_hosts
import training_job

TIMEOUT = 3
# The promise, and a second and a half for the other programs on these cores.
LIMIT = TIMEOUT + 1 + 1.5
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
    errors: str

    def named(self):
        """The ranks that it did not reach, or that others had reported to it."""
        found = re.findall(r"ranks? ([\d, ]+) did not|lost rank (\d+)", self.errors)
        return {int(rank) for pair in found for rank in re.findall(r"\d+", " ".join(pair))}


def run(case):
    """How each rank ended."""
    folder = training_job.new_folder()
    hosts, ranks = case.hosts, case.ranks_per_host
    with simulated_hosts.SimulatedHosts(hosts, ranks, case.rate) as simulated:
        command = training_job.command(folder, case.steps, layers=1, width=64)
        job = simulated.start(command, folder, {"ZERO_TIMEOUT": f"{TIMEOUT}s"})
        while len(training_job.log(folder)) < 3 and not job.wait(0.05):
            pass
        start = time.monotonic()
        for seconds, change, *arguments in case.changes:
            job.wait(start + seconds - time.monotonic())
            getattr(simulated, change)(*arguments)
        job.wait(60)
    ended = []
    for rank in job.ranks:
        seconds = rank.ended - start if rank.ended else float("inf")
        ended.append(Ended(rank.status, seconds, rank.errors.read_text(errors="replace")))
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
                about = f"{case}, rank {rank} after {end.seconds:.2f} s: {end.errors}"
                self.assertEqual(end.status, 1, about)
                self.assertTrue(names_missing(case, ended, rank), about)
                self.assertLess(end.seconds, limit, about)

    def expect_completed(self, *cases):
        for case, ended in run_all(cases):
            for rank, end in enumerate(ended):
                self.assertEqual(end.status, 0, f"{case}, rank {rank}: {end.errors}")

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
        soon = TIMEOUT / 4
        self.expect_completed(
            Case([(0, "set_up", 1, False), (soon, "set_up", 1, True)], set(), steps=15),
            Case([(0, "set_up", 0, False), (soon, "set_up", 0, True)], set(), hosts=3, steps=15))

    def test_a_link_that_is_slower_than_the_others(self):
        self.expect_completed(
            Case([(0, "set_rate", 1, "10mbit")], set(), rate="200mbit", steps=15),
            Case([(0, "set_rate", 0, "10mbit")], set(), hosts=3, rate="200mbit", steps=15))

    def test_a_link_that_is_too_slow_for_the_timeout(self):
        # An exchange takes 5 s. Those that are short may succeed before, each in its own time.
        self.expect_errors(
            Case([(0, "set_rate", 1, "128kbit")], {(0, 1)}),
            Case([(0, "set_rate", 1, "128kbit")], {(0, 1), (0, 2), (1, 2)}, hosts=3),
            limit=2 * LIMIT)


if __name__ == "__main__":
    training_job.skip_unless_available()
    unittest.main(verbosity=2)
