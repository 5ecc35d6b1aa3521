#!/usr/bin/env python3
# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Usage: docs/api/filter.py <header>

Prints a public header as Doxygen reads it: comments before a declaration and behind one become
documentation comments, the comment at the beginning that of the file, and TORCH_ARG(T, name) the
member `T name`.
"""

import re
import sys

COMMENT = re.compile(r"^(\s*)//(?!/) ?(.*)$")
SECTION = re.compile(r"^-{3,4} .* -{3,4}$|^\(?IWYU pragma")
ARGUMENT = re.compile(r"\bTORCH_ARG\((.*?), (\w+)\)(?=;| = )")


def escaped(text):
    """`text` without the characters that Doxygen takes for commands, which it leaves alone in `code`
    and in "quotes"."""
    parts = re.split(r"(`[^`]*`|\"[^\"]*\")", text)
    return "".join(part if part.startswith(("`", '"')) else re.sub(r"([\\@#<>&*~%])", r"\\\1", part)
                   for part in parts)


def marked_up(lines):
    """The lines of a comment in Doxygen's Markdown: indented ones are lists or code."""
    inside, result = None, []  # "code", "list"
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line and inside is None and indent >= 2:
            inside = "list" if re.match(r"\s*(\d+\.|-) ", line) else "code"
            result += ["", "@code{.cpp}"] if inside == "code" else [""]
        elif line and indent < 2 and inside:
            result += ["@endcode"] if inside == "code" else [""]
            inside = None
        result.append(line if inside == "code" else escaped(line[2:] if inside else line))
    return result + (["@endcode"] if inside == "code" else [])


def documentation(lines, indent):
    return [f"{indent}/// {line}".rstrip() for line in marked_up(lines)]


def converted(text):
    source = text.split("\n")
    result, k = [], 0
    # The comment at the beginning, up to #pragma once.
    while k < len(source) and source[k].startswith("//"):
        k += 1
    about = [line[3:] for line in source[:k] if "SPDX-" not in line]
    result += ["/// @file"] + documentation(about, "")
    column = None  # of the comment behind the last declaration
    while k < len(source):
        match = COMMENT.match(source[k])
        if match and column == source[k].index("//"):
            result.append(f"{match[1]}///< {escaped(match[2])}")
            k += 1
            continue
        column = None
        if match:
            block = []
            while k < len(source) and COMMENT.match(source[k]):
                block.append(COMMENT.match(source[k])[2])
                k += 1
            block = [line for line in block if not SECTION.match(line)]
            after = source[k].strip() if k < len(source) else ""
            if "TORCH_ARG(" in after:
                result.append("public:")
            if after and not after.startswith("#include"):
                result += documentation(block, match[1])
            continue
        line = source[k]
        k += 1
        behind = re.match(r"^(.*\S)\s+// (.*)$", line)
        if behind and not line.lstrip().startswith(("#", "}")):
            column = line.index("// ", len(behind[1]))
            line = f"{behind[1]}  ///< {escaped(behind[2])}"
        if "TORCH_ARG(" in line:
            line = "public:\n" * (not result[-1].lstrip().startswith("///")) + line
        result.append(ARGUMENT.sub(r"\1 \2", line))
    return "\n".join(result)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as header:
        print(converted(header.read()))
