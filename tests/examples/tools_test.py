#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""plan says for several numbers of ranks whether a job fits; inspect_checkpoint prints totals; and
no program shows a backtrace."""

import json
import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

EXAMPLES = Path(os.environ.get("EXAMPLES", "examples")).absolute()


def run(program, *arguments, **variables):
    return subprocess.run([EXAMPLES / program, *map(str, arguments)], capture_output=True, text=True,
                          timeout=150, env=dict(os.environ, OMP_NUM_THREADS="1", **variables))


class PlanTest(unittest.TestCase):
    WORLDS = (8, 64, 512)

    def plan(self, *arguments):
        done = run("plan/plan", "--model", "llama_7b", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_a_line_for_each_number_of_ranks_says_what_is_left(self):
        numbers = ",".join(map(str, self.WORLDS))
        device = 20
        reports = [json.loads(line) for line in
                   self.plan("--worlds", numbers, "--json").splitlines()]
        lines = [line.split() for line in
                 self.plan("--worlds", numbers, "--device-memory", device).splitlines()
                 if re.match(r" +\d", line)]
        self.assertEqual([int(line[0]) for line in lines], list(self.WORLDS))
        self.assertEqual([report["world"] for report in reports], list(self.WORLDS))
        for report, line in zip(reports, lines, strict=True):
            total = (report["memory"]["total"] + report["kept_bucket_bytes"]) / 1e9
            self.assertAlmostEqual(float(line[5]), total, delta=0.006)
            self.assertAlmostEqual(float(line[7]), device - total, delta=0.006)
            self.assertEqual("does not fit" in " ".join(line), total > device)
        # 2 bytes a parameter, 16 over the ranks, and 8 buckets of 32 MiB.
        self.assertAlmostEqual(float(lines[0][5]), 6.738 * (2 + 16 / 8) + 8 * 2**25 / 1e9, delta=0.1)
        self.assertIn("fit", lines[0])
        self.assertNotIn("fit", lines[2])

    def test_one_number_of_ranks_has_a_sentence(self):
        self.assertIn("does not fit in 20 GB: 7.22 GB are missing",
                      self.plan("--device-memory", 20))
        self.assertIn("fits in 40 GB: 12.78 GB are left for activations",
                      self.plan("--device-memory", 40))
        self.assertNotIn("fit", self.plan())

    def test_a_file_of_shapes_is_a_model(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "mlp.txt"
            file.write_text("# 24 layers\n\n" + "".join(
                f"{k}.weight 1024 1024\n{k}.bias 1024\n" for k in range(24)))
            own, known = (run("plan/plan", *model, "--world", 4, "--json")
                          for model in (("--shapes", file), ("--model", "mlp25m")))
            self.assertEqual(own.returncode, 0, own.stderr)
            own, known = json.loads(own.stdout), json.loads(known.stdout)
            for figures in own, known:
                del figures["plan_seconds"], figures["plan_peak_mb"]
            self.assertEqual(own.pop("model"), "mlp.txt")
            self.assertEqual(known.pop("model"), "mlp25m")
            self.assertEqual(own, known)

    def test_a_file_that_is_none_is_refused(self):
        done = run("plan/plan", "--shapes", "/no/such/file")
        self.assertEqual(done.returncode, 2)
        self.assertIn("cannot read /no/such/file", done.stderr)

    def test_any_number_of_ranks_has_machines_of_up_to_8(self):
        planned = run("plan/plan", "--model", "gpt2", "--world", 12).stdout
        self.assertIn("machines x ranks: 2 x 6\n", planned)
        refused = run("plan/plan", "--model", "gpt2", "--world", 12, "--ranks-per-machine", 8)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("--ranks-per-machine: expected a divisor of 12 ranks, got 8", refused.stderr)

    def test_split_masters_are_refused_where_a_job_refuses_them(self):
        for arguments in ("--dtype", "float16"), ("--layout", "per_parameter"):
            refused = run("plan/plan", "--model", "gpt2", "--split-masters", *arguments)
            self.assertIn("--split-masters: expected --dtype bfloat16", refused.stderr)
            self.assertEqual(refused.returncode, 2)

    def test_both_numbers_of_ranks_are_refused(self):
        self.assertNotEqual(run("plan/plan", "--world", 8, "--worlds", "8,16").returncode, 0)


class ZeroByHandTest(unittest.TestCase):
    def test_the_page_without_the_library_has_the_bits_of_the_library(self):
        done = subprocess.run([EXAMPLES / "zero_by_hand"], capture_output=True, text=True, timeout=150)
        source = Path("examples/zero_by_hand.cc").read_text()
        expected = re.search(r"Expected output:\n((?://   .*\n)+)", source).group(1)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(done.stdout, expected.replace("//   ", ""))


class SplatsTest(unittest.TestCase):
    def fit(self, ranks, folder):
        picture = Path(folder) / f"{ranks}.ppm"
        done = run("splats", "--ranks", ranks, "--steps", 200, "--picture", picture)
        self.assertEqual(done.returncode, 0, done.stderr)
        lines = re.findall(r"step +(\d+) +(\d+) splats, ([\d.]+) dB", done.stdout)
        head, pixels = picture.read_bytes().split(b"255\n", 1)
        self.assertEqual(head, b"P6\n48 48\n")
        self.assertEqual(len(pixels), 48 * 48 * 3)
        return lines, pixels

    def test_any_number_of_ranks_fits_the_same_picture(self):
        with tempfile.TemporaryDirectory() as folder:
            alone, pixels = self.fit(1, folder)
            both, others = self.fit(2, folder)
        self.assertEqual([line[:2] for line in alone], [line[:2] for line in both])
        self.assertEqual([line[0] for line in alone], ["0", "100", "200"])
        self.assertGreater(int(alone[-1][1]), int(alone[0][1]))
        self.assertGreater(float(alone[-1][2]), float(alone[0][2]) + 5)
        self.assertLessEqual(max(abs(a - b) for a, b in zip(pixels, others)), 8)

    def test_bad_arguments_are_one_line(self):
        for arguments, error in ((("--ranks", 5), "a divisor of the 2304 pixels, got 5"),
                                 (("--size", 5), "expected --ranks, --steps or --picture"),
                                 (("--ranks",), "expected a value after --ranks"),
                                 (("--steps", "4oo"), "--steps: expected a whole number, got 4oo"),
                                 (("--steps", -5), "--steps: expected 0 or more, got -5"),
                                 (("--steps", 2**40), "--steps: expected a whole number, got")):
            done = run("splats", *arguments)
            self.assertEqual(done.returncode, 1)
            self.assertIn(error, done.stderr)


class TrainGptTest(unittest.TestCase):
    def test_a_launcher_decides_the_number_of_ranks_that_share_the_batch(self):
        for variables in ({"RANK": "0", "WORLD_SIZE": "3"},
                          {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3",
                           "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
                          {"PMI_RANK": "0", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0",
                           "MPI_LOCALNRANKS": "3"},
                          {"SLURM_PROCID": "0", "SLURM_LOCALID": "0",
                           "SLURM_STEP_NUM_TASKS": "3"}):
            with self.subTest(variables):
                # 9 sequences suit 3 ranks, and not the 2 of --nproc. The port is refused after that.
                done = run("train_gpt/train_gpt", "--batch", 9, MASTER_ADDR="127.0.0.1",
                           MASTER_PORT="0", **variables)
                self.assertIn('MASTER_PORT="0": expected', done.stderr)


class CallersFolderTest(unittest.TestCase):
    """`bazel run` starts programs in another folder than the caller's."""

    def test_files_are_written_to_it(self):
        steps = (1, "--steps", 3)
        for program, *arguments in (("splats", "--ranks", *steps, "--picture"), ("hybrid_moe",),
                                    ("benchmark/benchmark", "--nproc", *steps, "--trace")):
            with tempfile.TemporaryDirectory() as folder:
                done = run(program, *arguments, "file", BUILD_WORKING_DIRECTORY=folder)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(os.listdir(folder), ["file"], program)


class BenchmarkTest(unittest.TestCase):
    def test_a_rank_has_one_thread_unless_the_environment_says_otherwise(self):
        for variables, threads in ({}, 1), ({"OMP_NUM_THREADS": "2"}, 2):
            environment = {name: value for name, value in os.environ.items()
                           if name != "OMP_NUM_THREADS"} | variables
            done = subprocess.run([EXAMPLES / "benchmark/benchmark", "--nproc", "1", "--steps", "1",
                                   "--json"], env=environment, capture_output=True, text=True,
                                  timeout=150)
            self.assertEqual(json.loads(done.stdout)["threads"], threads, done.stderr)


class HybridMoeTest(unittest.TestCase):
    def test_every_expert_has_a_name_of_its_own_in_a_checkpoint(self):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as parent:
            done = run("hybrid_moe", parent + "/saved")
            self.assertEqual(done.returncode, 0, done.stderr)
            shown = run("inspect_checkpoint", parent + "/saved").stdout
            for arguments in (["--help"], ["a", "b"]):
                done = run("hybrid_moe", *arguments)
                self.assertEqual(done.returncode, 0 if arguments == ["--help"] else 2, done.stderr)
                self.assertIn("usage: hybrid_moe", done.stderr)
        # 246 elements in dense layers, and 1072 in each of two experts.
        self.assertRegex(shown, r"(?m)^parameters: \d+ with 2390 elements$")


class ErrorsTest(unittest.TestCase):
    PROGRAMS = ("minimal", "hybrid_moe", "zero_by_hand", "splats", "train_gpt/train_gpt",
                "benchmark/benchmark")

    def test_an_error_is_one_line_without_a_backtrace(self):
        for program in self.PROGRAMS:
            environment = dict(os.environ, RANK="first", WORLD_SIZE="2")
            done = subprocess.run([EXAMPLES / program], env=environment, capture_output=True,
                                  text=True, timeout=150)
            expected = f'{Path(program).name}: environment variable RANK="first": expected'
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertTrue(done.stderr.startswith(expected), done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)


class InspectCheckpointTest(unittest.TestCase):
    def test_help_and_other_arguments(self):
        shown = run("inspect_checkpoint", "--help")
        self.assertEqual(shown.returncode, 0)
        self.assertIn("verifies every byte", shown.stdout)
        for arguments in ([], ["--all"], ["a", "b", "c"], ["a", "--help"]):
            refused = run("inspect_checkpoint", *arguments)
            self.assertEqual((refused.returncode, refused.stdout), (2, ""))
            self.assertIn("usage:", refused.stderr)

    def test_totals_are_those_of_the_files(self):
        folder = Path(tempfile.mkdtemp(dir=os.environ.get("TEST_TMPDIR")))
        trained = run("train_gpt/train_gpt", "--data", "examples/train_gpt", "--steps", 2,
                      "--layers", 1, "--width", 32, "--context", 32, "--batch", 4,
                      "--validation-sequences", 4, "--sample-bytes", 0, "--nproc", 2,
                      "--checkpoints", folder)
        self.assertEqual(trained.returncode, 0, trained.stderr)
        parameters = int(re.search(r"model: (\d+) parameters", trained.stdout).group(1))
        exported = folder / "model.safetensors"
        shown = run("inspect_checkpoint", folder, exported).stdout
        # The manifest is not in its own list.
        files = list((folder / "step-2").glob("*.safetensors"))
        size = sum(path.stat().st_size for path in files)
        self.assertRegex(shown, rf"(?m)^parameters: \d+ with {parameters} elements$")
        self.assertIn(f"in all {len(files)} files, {size} bytes; {size / parameters:.2f} bytes for "
                      f"each of {parameters} parameters", shown)
        self.assertIn("all checksums match", shown)
        self.assertGreater(exported.stat().st_size, 4 * parameters)
        content = bytearray(files[0].read_bytes())
        content[-5] ^= 4
        files[0].write_bytes(content)
        damaged = run("inspect_checkpoint", folder / "step-2")
        self.assertEqual(damaged.returncode, 1)
        self.assertIn(files[0].name, damaged.stderr)
        self.assertNotIn("match", damaged.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
