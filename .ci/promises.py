# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""docs/promises.md, and the tests that it names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A file's name, or a test's.
WORD = re.compile(r"\b(?:tests/)?((?:\w+/)*\w+_test)\b|`([A-Z]\w+)\.([A-Z]\w+)`")
CASE = re.compile(r"\b(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)")


def cases_by_file():
    """{name of a test file, with its folder: {Suite.Case}}"""
    return {str(path.relative_to(ROOT / "tests").with_suffix("")):
            {".".join(match.groups()) for match in CASE.finditer(path.read_text())}
            for path in ROOT.glob("tests/**/*_test.cc")}


def test_rules():
    """(its BUILD file, the rule) of each target that is a test."""
    for build in ROOT.glob("tests/*/BUILD"):
        for rule in ast.walk(ast.parse(build.read_text())):
            if isinstance(rule, ast.Call) and getattr(rule.func, "id", "").endswith("_test"):
                yield build, rule


def shared_targets():
    """{test file: its target} of files that are one target with others."""
    targets = {}
    for build, rule in test_rules():
        room, given = build.parent.name, {word.arg: word.value for word in rule.keywords}
        sources = ast.literal_eval(given["sources"]) if "sources" in given else []
        if len(sources) > 1:
            target = f"//tests/{room}:{given['name'].value}"
            targets |= {f"{room}/{file}": target for file in sources}
    return targets


def manual_files():
    """The test files that no rule runs without being asked to."""
    run, manual = set(), set()
    for build, rule in test_rules():
        words = {word.value for word in ast.walk(rule)
                 if isinstance(word, ast.Constant) and isinstance(word.value, str)}
        files = {f"{build.parent.name}/{word.removesuffix('.cc')}" for word in words
                 if re.fullmatch(r"\w+_test(\.cc)?", word)}
        (manual if "manual" in words else run).update(files)
    return manual - run


def rows():
    """(number of the line, its text, [(name of a case or None, names of the files before it)])"""
    for number, line in enumerate((ROOT / "docs/promises.md").read_text().splitlines(), 1):
        named, files, begins = [], [], True
        for file, suite, case in (match.groups() for match in WORD.finditer(line)):
            if file:
                files = [file] if not begins else files + [file]
                named.append((None, [file]))
            else:
                named.append((f"{suite}.{case}", files))
            begins = bool(file)
        yield number, line, named


def is_called(known, name):
    """Whether a file `known` is what the page calls `name`."""
    return known == name or known.endswith("/" + name)
