# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Builds faults in a copy of the tree and runs tests until one fails; remembers the verdicts."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import xml.etree.ElementTree
from pathlib import Path

import fault_switches

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("zero", "bookkeeping", "kernels")
BATCH = 3  # tests per call of Bazel: while one runs, the next is linked
FAR_BATCH = 10  # of those that seldom fail, once all are linked
BUILD_LIMIT = 1800  # seconds; a header can mean every file
SIZES = {"small": 5, "medium": 60, "large": 200, "enormous": 600}  # seconds, until one has run


def is_source(path):
    return (path.split("/")[0] in ROOMS and path.endswith((".cc", ".h", ".cu", ".cuh"))
            and not re.search(r"(_test|benchmark|reference|test_buffers|no_cuda|cuda_kernels)\.", path))


def copy_tree(files, tree):
    """Makes `tree` hold these files and no others. What is equal already is left alone."""
    tree.mkdir(parents=True, exist_ok=True)
    wanted = set(files)
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name not in (".bazel", ".deps")]
        for name in names:
            path = Path(folder) / name
            if str(path.relative_to(tree)) not in wanted:
                path.unlink()
    for name in files:
        source, target = ROOT / name, tree / name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
    # What git ignores and a build wants: local settings, and libtorch where it was fetched.
    for name in ("user.bazelrc", ".deps"):
        if (ROOT / name).exists() and not (tree / name).exists():
            (tree / name).symlink_to((ROOT / name).resolve())


def digest(files):
    whole = hashlib.sha256()
    for name in files:
        whole.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return whole.hexdigest()


class Bazel:
    """Bazel in the copy of the tree."""

    def __init__(self, tree, log):
        self.tree, self.log, self.events = tree, log, log.with_suffix(".events")
        self.sources = {}  # of each test that tests_of() named: paths

    def call(self, *arguments, limit=None):
        """(exit status or None where the time ran out, standard output)"""
        with open(self.log, "w", encoding="utf-8") as log:
            process = subprocess.Popen(["./bazelw", *arguments], cwd=self.tree, text=True,
                                       stdout=subprocess.PIPE, stderr=log)
            try:
                out, _ = process.communicate(timeout=limit)
                return process.returncode, out
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # cancels what runs
                process.communicate()
                return None, ""
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                process.wait()
                raise

    def tests_of(self, path):
        """{test that a change of this file can break: about how many seconds it takes}"""
        if path.endswith((".cu", ".cuh")):  # else all tests of //kernels, which may be built with it
            path = "tests/kernels/cuda_kernels_emulated"
        package = next(str(folder) for folder in Path(path).parents
                       if (self.tree / folder / "BUILD").is_file())
        name = path[len(package) + 1:]
        status, out = self.call("query", "--output=xml", "--xml:default_values",
                                f"kind('.*_test', rdeps(//..., //{package}:{name})) "
                                "except attr(tags, manual, //...)")
        if status != 0:
            raise SystemExit(f"{path}: no query of its tests; see {self.log}")
        sizes = {}
        for rule in xml.etree.ElementTree.fromstring(out).iter("rule"):
            sizes[rule.get("name")] = SIZES[rule.find("string[@name='size']").get("value")]
            self.sources[rule.get("name")] = [
                Path(label.get("value")[2:].replace(":", "/"))
                for label in rule.iterfind("list[@name='srcs']/label")]
        return sizes

    def build(self, packages):
        """Whether they build; the log names the lines that do not."""
        return self.call("build", "--color=no", "--keep_going", "--noremote_upload_local_results",
                         *packages)[0] == 0

    def test(self, targets, test_limit, config=""):
        """(exit status, {test: (verdict, seconds)}) of what ran. Ends at the first that fails."""
        self.events.unlink(missing_ok=True)
        status, _ = self.call(
            "test", "--color=no", "--build_tests_only", "--test_output=errors",
            "--notest_keep_going", "--test_runner_fail_fast", f"--test_timeout={test_limit}",
            "--noremote_upload_local_results",  # faults stay out of a cache that others use
            f"--build_event_json_file={self.events}", *config.split(), *targets,
            limit=BUILD_LIMIT + test_limit * len(targets))
        results = {}
        lines = self.events.read_text("utf-8").splitlines() if self.events.exists() else []
        for event in map(json.loads, lines):
            if "testResult" in event:
                result = event["testResult"]
                label = event["id"]["testResult"]["label"]
                before = results.get(label, ("PASSED", 0))  # of another shard
                verdict = result["status"] if before[0] == "PASSED" else before[0]
                seconds = int(result.get("testAttemptDurationMillis", 0)) / 1000
                results[label] = (verdict, max(before[1], seconds))
        return status, results

    def failed_case(self, target):
        """The name of the test case that failed, as far as the log of the test says."""
        logs = (self.tree / ".bazel/testlogs" / target[2:].replace(":", "/")).rglob("test.log")
        text = "".join(log.read_text("utf-8", "replace") for log in logs)  # one for each shard
        case = re.search(r"\[  FAILED  \] (\S+?),? ", text)
        running = re.findall(r"\[ RUN      \] (\S+)", text)
        return case.group(1) if case else (running[-1] + " ended" if running else "")


def near_and_far(tests, path, state, sources):
    """The tests that found a fault of this file before, are named like it or speak of it, and the
    rest: {test: about how many seconds it takes} twice, first what found one, then those of the
    file's room, among equals the fastest. `sources`: {test: its files}."""
    def words(name):
        return set(name.split("_")) - {"test", "zero", "optimizer"}

    def squeezed(text):
        return text.lower().replace("_", "")

    killers = {one["test"] for key, one in state["faults"].items()
               if key.startswith(path + "\n") and one["verdict"] == "found"}
    seconds = {test: state["seconds"].get(test, guess) for test, guess in tests.items()}

    def in_room(test):
        top, below = Path(path).parts[:2]  # kernels/cuda is one room with kernels
        return Path(test[2:].split(":")[0]).name == (below if top == "zero" else top)

    def rank(test):
        return test not in killers, not in_room(test), seconds[test], test

    near, far = {}, {}
    for test in sorted(tests, key=rank):
        files = [file for file in sources[test] if file.suffix == ".cc" and (ROOT / file).exists()]
        is_near = (test in killers
                   or any(squeezed(Path(path).stem) in squeezed((ROOT / file).read_text("utf-8"))
                          or words(Path(path).stem) & words(file.stem) for file in files)
                   # No test speaks of one of the files with kernels.
                   or path.endswith((".cu", ".cuh")) and in_room(test))
        (near if is_near else far)[test] = seconds[test]
    return near, far


def run_tests(bazel, fault, tests, state, size=BATCH, switched=False):
    """{"verdict": "found" | "survived" | "invalid", ...} of the fault that is in the tree. Runs
    {test: about how many seconds it takes} in turn, `size` of them in a call of Bazel."""
    config = "--cache_test_results=no" if switched else fault.config
    ran, names = [], list(tests)
    for batch in (names[at:at + size] for at in range(0, len(names), size)):
        limit = 60 + round(5 * max(tests[test] for test in batch))
        status, results = bazel.test(batch, limit, config)
        ran += results
        for test, (verdict, seconds) in results.items():
            if verdict == "PASSED" and not fault.config:
                state["seconds"][test] = seconds
            elif verdict in ("FAILED", "TIMEOUT"):
                case = "timeout" if verdict == "TIMEOUT" else bazel.failed_case(test)
                return {"verdict": "found", "test": test, "case": case, "ran": ran}
        if status is None:
            return {"verdict": "found", "test": batch[0], "case": "timeout", "ran": ran}
        if status == 1 and re.search(rf"{fault.path}:\d+", bazel.log.read_text("utf-8")):
            return {"verdict": "invalid"}
        if status != 0:  # the sources do not build without a fault either
            raise SystemExit(f"Bazel ended with status {status}; see {bazel.log}")
    return {"verdict": "survived", "ran": ran}


def judge(bazel, fault, tests, state):
    """Builds the fault by itself and runs its tests."""
    target = bazel.tree / fault.path
    before = target.read_text("utf-8")  # perhaps with switches, all of them off
    target.write_text(fault.applied((ROOT / fault.path).read_text("utf-8")), "utf-8")
    try:
        near, far = near_and_far(tests, fault.path, state, bazel.sources)
        result = run_tests(bazel, fault, near | far, state)
    finally:
        target.write_text(before, "utf-8")
    if result["verdict"] == "found" and not passes(bazel, result["test"], fault.config, state):
        raise SystemExit(f"{result['test']} fails without a fault too; see {bazel.log}")
    return result


def passes(bazel, test, config, state):
    """Whether the test passes without a fault. Runs once per test, configuration and tree."""
    key = f"{test} {config}".strip()
    if key not in state["passed"]:
        status, results = bazel.test([test], 900, config)
        if status != 0:
            return False
        state["passed"].append(key)
        if not config:
            state["seconds"][test] = results[test][1]
    return True


def number_of(fault):
    """The same in every call, so that a later one builds nothing again."""
    return int(hashlib.sha256(fault.key().encode()).hexdigest()[:7], 16)


class Run:
    """Judges faults in turn and remembers the results."""

    def __init__(self, folder, files):
        self.place = folder / "state.json"
        self.state = {"faults": {}, "seconds": {}, "alone": []}
        if self.place.exists():
            self.state |= json.loads(self.place.read_text("utf-8"))
        if self.state.get("tree") != digest(files):
            self.state.update(tree=digest(files), passed=[])
        self.tests_version = digest([name for name in files if not is_source(name)
                                     and name.startswith(("tests/", "kernels/", "examples/"))])
        self.bazel = Bazel(folder / "tree", folder / "bazel.log")
        self.tests_of = {}
        self.number_file = folder.resolve() / "fault"
        copy_tree(files, self.bazel.tree)

    def remembered(self, fault):
        result = self.state["faults"].get(fault.key())
        # A survivor gets another chance when the tests have changed.
        if result and result["verdict"] == "survived" and result["tests"] != self.tests_version:
            return None
        return result

    def write_switched(self, paths, numbered):
        """Puts the faults into the tree. {(file, line): number of the fault there}"""
        lines = {}
        for path in paths:
            of_file = {n: fault for n, fault in numbered.items() if fault.path == path}
            text, found = fault_switches.switched(path, (ROOT / path).read_text("utf-8"), of_file,
                                                  self.number_file)
            target = self.bazel.tree / path
            if target.read_text("utf-8") != text:
                target.write_text(text, "utf-8")
            lines |= {(path, line): n for n in found for line in found[n]}
        return lines

    def build_switched(self, candidates):
        """{number: fault} of those that build behind switches, which are in the tree then."""
        numbered = {number_of(fault): fault for fault in candidates
                    if fault.key() not in self.state["alone"]}
        paths = {fault.path for fault in numbered.values()}
        self.number_file.write_text("0")
        # Tests take long to build: first what they depend on.
        for packages in [f"//{room}/..." for room in ROOMS], ["//..."]:
            while True:
                lines = self.write_switched(paths, numbered)
                print(f"building {len(numbered)} faults into {' '.join(packages)}", flush=True)
                if self.bazel.build(packages):
                    break
                numbered = self.without_errors(numbered, lines)
        written = set(lines.values())
        self.state["alone"] = sorted({fault.key() for fault in candidates
                                      if number_of(fault) not in written} | set(self.state["alone"]))
        return {number_of(fault): fault for fault in candidates if number_of(fault) in written}

    def without_errors(self, numbered, lines):
        errors = re.findall(r"^(?:\./)?(\S+?):(\d+):(?:\d+:)? (?:fatal )?error",
                            self.bazel.log.read_text("utf-8"), re.MULTILINE)
        bad = {lines.get((path, int(line))) for path, line in errors} - {None}
        if not bad:  # the compiler names another line of the file, or one that includes it
            bad = {n for n, fault in numbered.items() if fault.path in dict(errors)}
        if not bad:
            raise SystemExit(f"no build; see {self.bazel.log}")
        return {n: fault for n, fault in numbered.items() if n not in bad}

    def judge_switched(self, number, fault, tests, size):
        """The verdict of these tests on one of build_switched()."""
        again = "--cache_test_results=no"
        while True:
            self.number_file.write_text(str(number))
            result = run_tests(self.bazel, fault, tests, self.state, size, switched=True)
            if result["verdict"] != "found":
                return result
            test = result["test"]
            real = result["case"] == "timeout" or self.bazel.test([test], 900, again)[0] != 0
            self.number_file.write_text("0")
            if real and passes(self.bazel, test, again, self.state):
                return result
            print(f"{test} fails without a fault too, or not always", flush=True)
            del tests[test]

    def depending(self, fault):
        if fault.path not in self.tests_of:
            self.tests_of[fault.path] = self.bazel.tests_of(fault.path)
        return self.tests_of[fault.path]

    def judge_all_switched(self, candidates, wanted, is_over):
        """Near tests find most faults in seconds; all others run for what is left then."""
        numbered = {n: fault for n, fault in self.build_switched(candidates).items()
                    if fault in wanted}
        left = []
        for number, fault in numbered.items():
            if is_over():
                return
            begun = time.monotonic()
            near, far = near_and_far(self.depending(fault), fault.path, self.state,
                                     self.bazel.sources)
            result = self.judge_switched(number, fault, near, BATCH)
            if result["verdict"] == "survived" and far:
                left.append((number, fault, near, far))
                print(f"no near test finds {fault.path}:{fault.line}: {fault.after}", flush=True)
            else:
                self.note(fault, result, begun)
        for number, fault, near, far in left:
            if is_over():
                return
            begun = time.monotonic()
            result = self.judge_switched(number, fault, far, FAR_BATCH)
            self.note(fault, result | {"ran": list(near) + result["ran"]}, begun)
        self.number_file.write_text("0")

    def judge(self, fault):
        begun = time.monotonic()
        return self.note(fault, judge(self.bazel, fault, self.depending(fault), self.state), begun)

    def note(self, fault, result, begun):
        result.update(tests=self.tests_version, seconds=round(time.monotonic() - begun))
        self.state["faults"][fault.key()] = result
        new = self.place.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1), "utf-8")
        new.replace(self.place)
        print(f"{result['verdict']:8} {result['seconds']:4} s  {fault.path}:{fault.line} {fault.kind}  "
              f"{result.get('test', '')} {fault.config} {result.get('case', '')}", flush=True)
        return result
