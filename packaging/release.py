#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Usage: packaging/release.py [--check | --archive <url>]

Writes the version of zero/version.h into every file that repeats it, and into each recipe where its
sources come from: the checkout that holds the recipe, or the archive of the release. --check writes
nothing, prints each file that is not up to date, and exits with 1 if there is one.

--archive packs the last commit into build/zero-<version>.tar.gz, which is to be uploaded to <url>, and
writes its checksums into the recipes; docs/releases.md has the other steps of a release.
"""

import gzip
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = ROOT / "packaging/archive.json"  # of the last release

# The text before and behind the version.
VERSIONS = {
    "MODULE.bazel": (r'^    name = "zero",\n    version = "', r'",$'),
    "docs/building.md": (r'^bazel_dep\(name = "zero", version = "', r'"\)$'),
    "CITATION.cff": (r"^version: ", r"$"),
    "packaging/vcpkg/zero/vcpkg.json": (r'^  "version": "', r'",$'),
    "packaging/conan/conanfile.py": (r'^    version = "', r'"$'),
    "packaging/conda/recipe.yaml": (r'^  version: "', r'"$'),
}
# The same for its first two numbers.
MINOR_VERSIONS = {path: (r"\bfind_package\(zero ", r" CONFIG REQUIRED\)") for path in (
    "README.md", "docs/building.md", "packaging/conan/test_package/CMakeLists.txt")}

# Between two comments of a recipe: its sources in a checkout, and those of a release.
SOURCES = {
    "packaging/vcpkg/zero/portfile.cmake": ("""\
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
""", """\
vcpkg_download_distfile(ARCHIVE URLS "<url>" FILENAME "zero-<version>.tar.gz" SHA512 <sha512>)
vcpkg_extract_source_archive(SOURCE_PATH ARCHIVE "${ARCHIVE}")
"""),
    "packaging/conan/conanfile.py": ("""\
    def export_sources(self):
        checkout = os.path.join(self.recipe_folder, "..", "..")
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "zero/*", "kernels/*",
                        "bookkeeping/*", "third_party/gloo_stubs/*", "third_party/pch/*"):
            copy(self, pattern, src=checkout, dst=self.export_sources_folder)
""", """\
    def source(self):
        from conan.tools.files import get
        get(self, "<url>", sha256="<sha256>", strip_root=True)
"""),
    "packaging/conda/recipe.yaml": ("""\
source:
  path: ../..
""", """\
source:
  url: <url>
  sha256: <sha256>
"""),
    "packaging/spack/spack_repo/zero/packages/zero/package.py": ("""\
    git = "file://" + os.path.realpath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 6))
    version("<version>", branch="main")
""", """\
    url = "<url>"
    version("<version>", sha256="<sha256>")
"""),
}


def version():
    text = (ROOT / "zero/version.h").read_text()
    return ".".join(re.findall(r"^#define ZERO_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", text, re.MULTILINE))


def replaced(path, text, pattern, new):
    """`text` with `new` in the one place of `pattern`, between its two groups."""
    result, count = re.subn(pattern, lambda match: match[1] + new + match[2], text, flags=re.MULTILINE)
    if count != 1:
        sys.exit(f"release: {path}: expected one place for {pattern}, got {count}")
    return result


def up_to_date():
    """{path: text} of the files, as they have to be."""
    values = {"version": version()}
    archive = json.loads(ARCHIVE.read_text()) if ARCHIVE.exists() else {}
    released = archive.get("version") == values["version"]
    if released:
        values.update(archive)
    texts = {path: (ROOT / path).read_text() for path in {*VERSIONS, *MINOR_VERSIONS, *SOURCES}}
    for path, (before, behind) in VERSIONS.items():
        texts[path] = replaced(path, texts[path], f"({before})[^\"\n]*({behind})", values["version"])
    for path, (before, behind) in MINOR_VERSIONS.items():
        texts[path] = replaced(path, texts[path], f"({before})[\\d.]+({behind})",
                               values["version"].rpartition(".")[0])
    for path, (checkout, release) in SOURCES.items():
        block = re.sub(r"<(version|url|sha\d+)>", lambda match: values[match[1]],
                       release if released else checkout)
        texts[path] = replaced(path, texts[path],
                               r"(# source: written by packaging/release\.py\n)[\s\S]*?(^ *# end of source$)", block)
    return texts


def pack(url):
    """Writes the archive of the last commit, and ARCHIVE."""
    name = f"zero-{version()}"
    tar = subprocess.run(["git", "archive", "--format=tar", f"--prefix={name}/", "HEAD"], cwd=ROOT,
                         check=True, capture_output=True).stdout
    data = gzip.compress(tar, mtime=0)
    path = ROOT / f"build/{name}.tar.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    ARCHIVE.write_text(json.dumps({"version": version(), "url": url,
                                   "sha256": hashlib.sha256(data).hexdigest(),
                                   "sha512": hashlib.sha512(data).hexdigest()}, indent=2) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(data)} bytes")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--archive"] and len(arguments) == 2:
        pack(arguments[1])
    elif arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    stale = {path: text for path, text in up_to_date().items() if text != (ROOT / path).read_text()}
    for path, text in sorted(stale.items()):
        if arguments == ["--check"]:
            print(f"{path}: not up to date; run packaging/release.py")
        else:
            (ROOT / path).write_text(text)
            print(f"wrote {path}")
    return 1 if stale and arguments == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main())
