#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""torchrun restarts train_gpt, which goes on from its newest checkpoint."""

import os
import signal
import unittest

import launched_job
import slurm_node
import torchrun
from launched_job import LONG, Job

# A kill lands between two checkpoints, and long before the end.
STEPS, SAVE_EVERY, KILL_AFTER = 400, 40, 100


class RestartTest(unittest.TestCase):
    python = None

    def test_a_killed_rank_is_restarted_and_the_losses_keep_their_bits(self):
        whole, killed = launched_job.new_folder(), launched_job.new_folder()
        agent = torchrun.agent(self.python, "--standalone", "--nproc-per-node",
                               str(launched_job.RANKS), "--max-restarts", "1")

        def trainer(folder):
            return launched_job.trainer(folder, STEPS, "--resume", save_every=SAVE_EVERY)

        with Job([*trainer(whole), "--nproc", str(launched_job.RANKS)], whole) as job:
            self.assertEqual(job.wait(), 0, job.text())
        with Job([*agent, *trainer(killed)], killed) as job:
            job.wait_until(lambda: len(launched_job.steps_of(killed)) >= KILL_AFTER, "100 steps")
            os.kill(job.processes()[1], signal.SIGKILL)
            self.assertEqual(job.wait(), 0, job.text())
            text = job.text()
        self.assertIn("resumed after step", text)
        resumed = int(text.split("resumed after step ")[1].split()[0])
        self.assertGreaterEqual(resumed, KILL_AFTER - SAVE_EVERY)
        self.assertEqual(resumed % SAVE_EVERY, 0)
        expected = launched_job.bits_of(launched_job.steps_of(whole))
        self.assertEqual(len(expected), STEPS)
        self.assertLess(resumed, STEPS)
        actual = launched_job.bits_of(launched_job.steps_of(killed, resumed))
        self.assertEqual(actual, expected[resumed:])
        print(f"killed after step {len(launched_job.steps_of(killed))}, resumed after {resumed}; "
              f"last loss {actual[-1][1]!r}, uninterrupted {expected[-1][1]!r}", flush=True)

    def agents(self, folder, nodes, restarts, save_every=LONG):
        """Two torchruns of one rank each, of which the first serves the rendezvous."""
        endpoint = f"127.0.0.1:{slurm_node.free_port()}"

        def start(name, is_host):
            return self.enterContext(Job([
                *torchrun.agent(self.python, "--nnodes", nodes, "--nproc-per-node", "1",
                                "--max-restarts", str(restarts), "--rdzv-backend", "c10d",
                                "--rdzv-endpoint", endpoint,
                                "--rdzv-conf", f"last_call_timeout=5,is_host={is_host}"),
                *launched_job.trainer(folder, LONG, "--resume", save_every=save_every)],
                folder, name=name))

        return start("first", is_host=1), start("second", is_host=0)

    def wait_for_two_ranks(self, first, second, folder):
        first.wait_until(lambda: {*first.processes(), *second.processes()} == {0, 1}, "two ranks")
        first.wait_until(lambda: launched_job.steps_of(folder), "the first step")

    def test_sigterm_to_one_agent_is_no_success_for_the_other(self):
        folder = launched_job.new_folder()
        first, second = self.agents(folder, nodes="2", restarts=0)
        self.wait_for_two_ranks(first, second, folder)
        second.process.terminate()
        self.assertNotEqual(second.wait(), 0, second.text())
        self.assertEqual(first.wait(), 1, first.text())
        self.assertRegex(first.text(), r"exitcode *: 75\b")
        self.assertIn("was not signalled itself; it ends with exit code 75", first.text())
        self.assertNotIn("was not signalled itself", second.text())
        self.assertEqual(launched_job.saved_in(folder),
                         [launched_job.steps_of(folder)[-1]["step"]])

    def test_the_other_agent_goes_on_where_one_is_enough(self):
        folder = launched_job.new_folder()
        first, second = self.agents(folder, nodes="1:2", restarts=3)
        self.wait_for_two_ranks(first, second, folder)
        second.process.terminate()
        second.wait()
        first.wait_until(lambda: launched_job.saved_in(folder), "a checkpoint")
        saved = launched_job.saved_in(folder)[-1]
        first.wait_until(lambda: launched_job.steps_of(folder, saved), "a step of one rank")
        self.assertIn("1 ranks, stage 2", first.text())
        self.assertEqual(launched_job.steps_of(folder, saved)[0]["step"], saved + 1)

    def test_all_ranks_of_two_agents_meet_again_after_a_kill(self):
        """The agents count their restarts by themselves, and serve one store for all of them."""
        folder = launched_job.new_folder()
        first, second = self.agents(folder, nodes="2", restarts=3, save_every=SAVE_EVERY)
        for killed in (first, second):
            self.wait_for_two_ranks(first, second, folder)
            before = launched_job.saved_in(folder)
            first.wait_until(lambda: launched_job.saved_in(folder) > before, "a checkpoint")
            output = lambda: first.text() + second.text()
            resumed = output().count("resumed after step")
            os.kill(*killed.processes().values(), signal.SIGKILL)
            # Sooner than at the timeout of a meeting.
            first.wait_until(lambda: output().count("resumed after step") > resumed, "a restart",
                             seconds=60)


if __name__ == "__main__":
    RestartTest.python = torchrun.python_with_torch()
    if RestartTest.python is None:
        launched_job.skip("no Python with torch.distributed.run; set ZERO_PYTHON to one")
    launched_job.run_cases_at_once(RestartTest)
