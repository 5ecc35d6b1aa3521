# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The contract of every launcher with train_gpt; a test case for each is made of this class."""

import os
import signal
import subprocess

import launched_job
from launched_job import LONG, Job

STEPS = 12
# Arguments that train_gpt cannot use: 12 sequences do not make 10 equal micro-batches.
UNUSABLE = ["--accumulate", "5"]
USAGE_ERROR = 2


class LauncherContract:
    environment = None

    def command(self, trainer):
        """The launcher's command line for launched_job.RANKS ranks of `trainer`."""
        raise NotImplementedError

    def check_exit_code_of_ranks(self, expected, status, text):
        """Fails unless the launcher passes on `expected`, with which all ranks ended."""
        self.assertEqual(status, expected, text)

    def terminate(self, job):
        """Ends the job as its users and schedulers do."""
        os.kill(job.process.pid, signal.SIGTERM)

    def interrupt(self, job):
        """Ctrl-C: the terminal sends SIGINT to all of its foreground processes."""
        os.killpg(job.process.pid, signal.SIGINT)

    def start(self, folder, steps, *options):
        return Job(self.command(launched_job.trainer(folder, steps, *options)), folder,
                   self.environment)

    def start_and_train(self, folder):
        job = self.start(folder, LONG)
        job.wait_until(lambda: launched_job.steps_of(folder), "the first step")
        self.assertEqual(sorted(job.processes()), list(range(launched_job.RANKS)))
        return job

    def check_saved(self, folder, job):
        job.wait()
        job.wait_for_ranks_to_end()
        self.assertEqual(job.text().count("stopped by a signal; --resume goes on"), 1, job.text())
        last = launched_job.steps_of(folder)[-1]["step"]
        self.assertEqual(launched_job.saved_in(folder), [last], job.text())
        # Every rank was signalled, so none claims that the training has to go on.
        self.assertNotIn("was not signalled itself", job.text())

    def test_losses_are_those_of_the_local_launcher(self):
        alone, folder = launched_job.new_folder(), launched_job.new_folder()
        subprocess.run(launched_job.trainer(alone, STEPS, "--nproc", str(launched_job.RANKS)),
                       check=True, capture_output=True, timeout=150,
                       env=dict(os.environ, OMP_NUM_THREADS="1"))
        with self.start(folder, STEPS) as job:
            self.assertEqual(job.wait(), 0, job.text())
        expected = launched_job.bits_of(launched_job.steps_of(alone))
        self.assertEqual(len(expected), STEPS)
        self.assertEqual(launched_job.bits_of(launched_job.steps_of(folder)), expected)
        self.assertIn(f"{launched_job.RANKS} ranks", job.text())

    def test_exit_code_of_the_ranks_is_passed_on(self):
        with self.start(launched_job.new_folder(), STEPS, *UNUSABLE) as job:
            status = job.wait()
            self.assertIn("--batch: expected a multiple of 10", job.text())
            self.check_exit_code_of_ranks(USAGE_ERROR, status, job.text())

    def test_a_killed_rank_ends_the_job(self):
        with self.start_and_train(launched_job.new_folder()) as job:
            os.kill(job.processes()[1], signal.SIGKILL)
            self.assertNotEqual(job.wait(), 0, job.text())
            job.wait_for_ranks_to_end()

    def test_sigterm_saves_and_ends_all_ranks(self):
        folder = launched_job.new_folder()
        with self.start_and_train(folder) as job:
            self.terminate(job)
            self.check_saved(folder, job)

    def test_ctrl_c_ends_all_ranks(self):
        folder = launched_job.new_folder()
        with self.start_and_train(folder) as job:
            self.interrupt(job)
            self.check_saved(folder, job)
