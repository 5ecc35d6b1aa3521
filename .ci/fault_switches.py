# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Builds many faults into one file, of which a number in a file turns one on when a program runs.

So a hundred faults take one build. Text only, as in faults.py: an expression E with a fault E'
becomes (zero_fault(7) ? (E') : (E)). Not every fault can be written so, for example one in a
constant expression; the compiler says which.
"""

import re
from typing import NamedTuple

import faults

ASSIGNED = re.compile(r" [-+*/%|&]?= |\breturn\b")
HEADER = re.compile(r"\s*(?:(?:if|for|while) \(|else\b|case [\w:]+:|default:)")

# Reads the number without memory of its own, which some tests count.
PREFIX = """#ifndef ZERO_FAULT_SWITCHES
#define ZERO_FAULT_SWITCHES
#include <fcntl.h>
#include <unistd.h>
inline bool zero_fault(int fault) {{
  static const int on = [] {{
    char text[16] = {{}};
    int number = 0;
    const int file = open("{number}", O_RDONLY | O_CLOEXEC);
    if (file >= 0 && read(file, text, sizeof text - 1) > 0)
      for (const char* c = text; *c >= '0' && *c <= '9'; ++c) number = 10 * number + (*c - '0');
    if (file >= 0) close(file);
    return number;
  }}();
  return on == fault;
}}
struct ZeroFaultNot {{ bool dropped; }};
template <typename T> bool operator->*(ZeroFaultNot fault, const T& value) {{
  return fault.dropped ? static_cast<bool>(value) : !value;
}}
#endif
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wparentheses"
#line 1 "{path}"
"""


class Switch(NamedTuple):
    """Replaces text[start:end] of the file by `new`."""
    start: int
    end: int
    new: str


def region(masked, partner, start, end):
    """The expression around [start, end): to the next comma, semicolon or open bracket."""
    opened = faults.enclosing(masked, partner, start)
    left, right = (0, len(masked)) if opened is None else (opened + 1, partner[opened])
    cuts = [at for at in faults.top_level(masked, partner, left, right, ",;")]
    # A block that ends before it.
    cuts += [at for at in range(left, start) if masked[at] == "}" and partner.get(at, -1) >= left
             and re.match(r"\s*\n", masked[at + 1:])]
    left = max([at + 1 for at in cuts if at < start], default=left)
    right = min([at for at in cuts if at >= end], default=right)
    while header := HEADER.match(masked[left:start]):
        bracket = left + header.end() - 1
        left = partner[bracket] + 1 if masked[bracket] == "(" else left + header.end()
    for match in ASSIGNED.finditer(masked, left, start):
        if faults.enclosing(masked, partner, match.start()) == opened:
            left = match.end()
    left += len(masked[left:start]) - len(masked[left:start].lstrip())
    return left, right


def switch(text, masked, partner, fault, number):
    on, old = f"zero_fault({number})", text[fault.start:fault.end]
    start, end = fault.start, fault.end
    if fault.kind == "statement":
        return Switch(start, end, f"{{ if (!{on}) {{ {old} }} }}")
    if fault.kind in ("constant", "boolean"):
        return Switch(start, end, f"({on} ? {fault.new} : {old})")
    if fault.kind == "condition" and not fault.new:
        return Switch(start, end, f"ZeroFaultNot{{{on}}}->*")
    if fault.kind == "condition":
        return Switch(start, end, f"{on} != static_cast<bool>({old})")
    if fault.kind == "arguments":  # with the name of what is called
        start = faults.enclosing(masked, partner, fault.start)
        end = partner[start] + 1
    left, right = region(masked, partner, start, end)
    changed = text[left:fault.start] + fault.new + text[fault.end:right]
    return Switch(left, right, f"({on} ? ({changed}) : ({text[left:right]}))")


def switched(path, text, numbered, number_file):
    """(the text with its faults behind switches, {number: lines}) of {number: fault}. Faults whose
    expression has one already are left out."""
    masked = faults.mask(text)
    partner = faults.brackets(masked)
    taken, lines = [], {}
    for number, fault in sorted(numbered.items()):
        one = switch(text, masked, partner, fault, number)
        if all(one.end <= other.start or other.end <= one.start for other in taken):
            taken.append(one)
            first = text.count("\n", 0, one.start) + 1
            lines[number] = range(first, first + text.count("\n", one.start, one.end) + 1)
    for one in sorted(taken, reverse=True):
        # One line for one line, so that what the compiler says is found again.
        new = " ".join(re.sub(r"//[^\n]*", "", one.new).split("\n"))
        text = text[:one.start] + new + "\n" * text[one.start:one.end].count("\n") + text[one.end:]
    return PREFIX.format(number=number_file, path=path) + text, lines
