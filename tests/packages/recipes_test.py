#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Usage: tests/packages/recipes_test.py

What packages repeat of each other, as far as it can be seen without their tools: versions and sources,
the repositories of WORKSPACE and MODULE.bazel, options, flags and lists of packages. Those of Conan and
rattler-build run too where they are installed. .ci/check_api is tried on headers that change.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*command, folder=ROOT):
    """(exit status, output) of a command."""
    done = subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def change(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: expected {old} once"
    path.write_text(text.replace(old, new))


class Copy(unittest.TestCase):
    """A copy of the repository's files, which a test may change."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                               check=True, capture_output=True, text=True).stdout.split("\n")
        for name in filter(lambda name: name and (ROOT / name).is_file(), names):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)


class ReleaseTest(Copy):
    def release(self, *arguments):
        return run(sys.executable, "-B", "packaging/release.py", *arguments, folder=self.root)

    def git(self, *arguments):
        return subprocess.run(["git", "-c", "user.name=zero", "-c", "user.email=zero@localhost", *arguments],
                              cwd=self.root, check=True, capture_output=True, text=True).stdout

    def test_every_file_has_the_version_of_the_header(self):
        self.assertEqual(run(sys.executable, "-B", "packaging/release.py", "--check"), (0, ""))
        change(self.root / "zero/version.h", "#define ZERO_VERSION_MINOR 1", "#define ZERO_VERSION_MINOR 7")
        status, output = self.release("--check")
        self.assertEqual(status, 1)
        self.assertEqual(len(output.splitlines()), 9, output)
        self.assertEqual(self.release()[0], 0)
        self.assertEqual(self.release("--check"), (0, ""))
        self.assertIn('version = "0.7.0"', (self.root / "MODULE.bazel").read_text())
        self.assertIn("find_package(zero 0.7 CONFIG", (self.root / "docs/building.md").read_text())

    def test_recipes_of_a_release_name_the_archive_and_its_checksums(self):
        self.git("init", "--quiet")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=all")
        self.assertEqual(self.release("--archive", "https://example.org/zero.tar.gz")[0], 0)
        data = (self.root / "build/zero-0.1.0.tar.gz").read_bytes()
        for path, algorithm in (("packaging/conda/recipe.yaml", "sha256"),
                                ("packaging/conan/conanfile.py", "sha256"),
                                ("packaging/spack/spack_repo/zero/packages/zero/package.py", "sha256"),
                                ("packaging/vcpkg/zero/portfile.cmake", "sha512")):
            text = (self.root / path).read_text()
            self.assertIn("https://example.org/zero.tar.gz", text)
            self.assertIn(hashlib.new(algorithm, data).hexdigest(), text)
        self.assertEqual(self.release("--check"), (0, ""))
        change(self.root / "zero/version.h", "#define ZERO_VERSION_PATCH 0", "#define ZERO_VERSION_PATCH 1")
        self.assertEqual(self.release()[0], 0)  # the archive is that of another version
        self.assertIn("path: ../..", (self.root / "packaging/conda/recipe.yaml").read_text())


class ApiTest(Copy):
    def check(self):
        return run(sys.executable, "-B", ".ci/check_api", folder=self.root)

    def test_a_change_needs_a_line_in_the_changelog(self):
        self.assertEqual(self.check()[0], 0, self.check()[1])
        # What has changed since the last release is no part of this test.
        self.assertEqual(run(sys.executable, "-B", ".ci/check_api", "--write", folder=self.root)[0], 0)
        options, changelog = self.root / "zero/options.h", self.root / "CHANGELOG.md"
        change(options, "TORCH_ARG(bool, fused) = true", "TORCH_ARG(bool, brand_new) = true")
        changelog.write_text("# Changelog\n\n## 0.1.0\n\nNothing.\n\n## 0.0.9\n\nfused, brand_new\n")
        status, output = self.check()
        self.assertEqual(status, 1)
        self.assertIn("does not name brand_new", output)
        self.assertIn("does not name fused", output)
        changelog.write_text("# Changelog\n\n## 0.1.0\n\n`brand_new` replaces `fused`.\n\n## 0.0.9\n")
        self.assertEqual(self.check()[0], 0)

    def test_comments_bodies_and_private_members_are_no_api(self):
        header = self.root / "zero/process_group.h"
        (self.root / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n\nNothing.\n")
        before = self.check()[1]
        change(header, "  int machines_ = 0;", "  int another_ = 0;  // of another kind")
        change(header, "return machines_;", "return 1;")
        self.assertEqual(self.check()[1], before)
        change(header, "int machines() const", "int machines()")
        self.assertIn("does not name machines", self.check()[1])


class ModuleTest(unittest.TestCase):
    """MODULE.bazel and module.bzl, whose language is a part of Python, run with functions that note
    their calls. No Bazel that reads MODULE.bazel is needed."""

    def loaded(self, name):
        """The globals of third_party/<name>; what it loads and Bazel's own functions do nothing."""
        scope = {"module_extension": lambda implementation: implementation,
                 "repository_rule": lambda **_: None, "attr": unittest.mock.MagicMock()}

        def load(path, *symbols):
            if path.endswith(("repositories.bzl", "cc_rules.bzl")):
                others = self.loaded(path.rpartition(":")[2])
                scope.update({symbol: others[symbol] for symbol in symbols})
                return
            for symbol in symbols:
                scope[symbol] = lambda **arguments: self.made.append(arguments["name"])
        scope["load"] = load
        exec((ROOT / "third_party" / name).read_text(), scope)
        if name == "cc_rules.bzl":
            scope["cc_rules_repository"] = lambda name, from_rules_cc: (
                self.made.append(name), self.rules.append(from_rules_cc))
        return scope

    def test_module_has_the_repositories_of_the_workspace(self):
        self.made, self.rules = [], []
        self.loaded("module.bzl")["outside"](None)
        self.assertEqual(self.rules, [True])
        used, depends = [], {}
        exec((ROOT / "MODULE.bazel").read_text(), {
            "module": lambda **_: None, "bazel_dep": lambda name, version: depends.update({name: version}),
            "use_extension": lambda path, name: (path, name),
            "use_repo": lambda extension, *names: used.extend(names)})
        self.assertEqual(sorted(used), sorted(self.made))
        outside = set()
        for path in [*ROOT.glob("**/BUILD"), *ROOT.glob("third_party/*.b*"), *ROOT.glob("third_party/*.BUILD")]:
            # Debian's Bazel alone reads these two.
            if "coverage" not in str(path) and ".deps" not in path.parts and ".bazel" not in path.parts:
                outside.update(re.findall(r'"@(\w+)//', path.read_text()))
        self.assertEqual(outside - set(used) - set(depends) - {"bazel_tools", "zero"}, set())

    def test_the_document_shows_the_version_of_rules_cc(self):
        pattern = r'bazel_dep\(name = "rules_cc", version = "([\d.]+)"\)'
        self.assertEqual(re.findall(pattern, (ROOT / "MODULE.bazel").read_text()),
                         re.findall(pattern, (ROOT / "docs/building.md").read_text()))


class RecipeTest(unittest.TestCase):
    def test_presets_have_the_flags_of_bazelrc(self):
        presets = json.loads((ROOT / "CMakePresets.json").read_text())
        asan = next(preset for preset in presets["configurePresets"] if preset["name"] == "asan")
        lines = re.findall(r"^build:asan --copt=(.*)$", (ROOT / ".bazelrc").read_text(), re.MULTILINE)
        theirs = [flag.removeprefix("--copt=") for line in lines for flag in line.split()
                  if not flag.startswith("--linkopt")]
        self.assertEqual(sorted(asan["cacheVariables"]["CMAKE_CXX_FLAGS"].split()), sorted(theirs))
        tests = next(preset for preset in presets["testPresets"] if preset["name"] == "asan")
        theirs = re.findall(r"^build:asan --test_env=(.*)$", (ROOT / ".bazelrc").read_text(), re.MULTILINE)
        self.assertEqual(sorted("=".join(item) for item in tests["environment"].items()), sorted(theirs))

    def test_vcpkg_port_configures_with_options_that_exist(self):
        if not shutil.which("cmake"):
            self.skipTest("no cmake here")
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "port.cmake"
            script.write_text("""
function(vcpkg_check_features)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "OUT_FEATURE_OPTIONS" "FEATURES")
  set(${arg_OUT_FEATURE_OPTIONS} -DZERO_CUDA=OFF PARENT_SCOPE)
endfunction()
function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
  message(STATUS "configured ${arg_SOURCE_PATH} ${arg_OPTIONS}")
endfunction()
function(vcpkg_cmake_install)
endfunction()
function(vcpkg_cmake_config_fixup)
endfunction()
function(vcpkg_fixup_pkgconfig)
endfunction()
function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
  if(NOT EXISTS "${arg_FILE_LIST}")
    message(FATAL_ERROR "no licence in ${arg_FILE_LIST}")
  endif()
endfunction()
include("%s/packaging/vcpkg/zero/portfile.cmake")
""" % ROOT)
            status, output = run("cmake", f"-DCURRENT_PACKAGES_DIR={folder}/none", "-P", str(script))
        self.assertEqual(status, 0, output)
        self.assertIn(f"configured {ROOT} ", output)
        self.options_exist(re.findall(r"-D(\w+)=", output))

    def options_exist(self, names):
        lists = (ROOT / "CMakeLists.txt").read_text()
        self.assertTrue(names)
        for name in names:
            self.assertTrue(name.startswith("CMAKE_") or re.search(rf"option\({name} ", lists), name)

    def test_recipes_name_options_that_exist(self):
        texts = {path: (ROOT / "packaging" / path).read_text() for path in (
            "conan/conanfile.py", "conda/recipe.yaml", "spack/spack_repo/zero/packages/zero/package.py")}
        self.options_exist(re.findall(r'cache_variables\["(\w+)"\]', texts["conan/conanfile.py"]))
        self.options_exist(re.findall(r"-D(\w+)=", texts["conda/recipe.yaml"]))
        self.options_exist(re.findall(r'define_from_variant\("(\w+)"', texts[
            "spack/spack_repo/zero/packages/zero/package.py"]))
        minimum = re.search(r"set\(ZERO_TORCH_MINIMUM ([\d.]+)\)", (ROOT / "cmake/zero_libtorch.cmake").read_text())[1]
        self.assertIn(f"libtorch >={minimum}", texts["conda/recipe.yaml"])
        self.assertIn(f"py-torch@{minimum}:", texts["spack/spack_repo/zero/packages/zero/package.py"])

    def test_spack_finds_the_checkout(self):
        path = ROOT / "packaging/spack/spack_repo/zero/packages/zero/package.py"
        text = re.sub(r"^from spack.*", "", path.read_text(), flags=re.MULTILINE)
        scope = {"__file__": str(path), "CMakePackage": object}
        for name in ("license", "generator", "version", "variant", "depends_on", "conflicts"):
            scope[name] = lambda *_, **__: None
        exec(text, scope)
        # A release has the sum of an archive in place of a checkout.
        self.assertTrue("sha256" in text or scope["Zero"].git == f"file://{ROOT}", text)

    def test_the_image_has_the_packages_of_bazelw(self):
        versions = (ROOT / "third_party/versions.env").read_text()
        needed = " ".join(re.findall(r'^APT_(?:BAZEL_)?PACKAGES="(.*)"$', versions, re.MULTILINE)).split()
        image = set((ROOT / "packaging/Dockerfile").read_text().split())
        self.assertEqual(set(needed) - image, set())

    def test_the_command_of_conan_sets_the_standard_that_the_recipe_asks_for(self):
        standard = re.search(r"check_min_cppstd\(self, (\d+)\)", (ROOT / "packaging/conan/conanfile.py").read_text())[1]
        commands = re.findall(r"`(conan create [^`]*)`", (ROOT / "docs/building.md").read_text())
        self.assertTrue(commands)
        for command in commands:
            self.assertIn(f" -s compiler.cppstd={standard}", command)

    def test_conan_reads_the_recipe(self):
        if not shutil.which("conan"):
            self.skipTest("no conan here")
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(["conan", "export", "packaging/conan"], cwd=ROOT, text=True,
                                  env=dict(os.environ, CONAN_HOME=folder), capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("Exported: zero/", done.stderr)

    def test_rattler_build_renders_the_recipe(self):
        try:
            from rattler_build import Stage0Recipe, VariantConfig
        except ImportError:
            self.skipTest("no py-rattler-build here")
        variants = VariantConfig({"c_stdlib": ["sysroot"], "cxx_compiler": ["gxx"], "libtorch": ["2.9"]})
        rendered = Stage0Recipe.from_file(str(ROOT / "packaging/conda/recipe.yaml")).render(variants)
        self.assertEqual(len(rendered), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
