# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Finds places in C++ sources where a small fault can be put. Text only, no compiler.

Relies on clang-format's layout: a binary operator has a space on both sides, the angle bracket of
a template has none.
"""

import hashlib
import re
from typing import NamedTuple

OPERATORS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||",
             "||": "&&", "+": "-", "-": "+", "*": "/", "/": "*", "%": "*", "+=": "-=", "-=": "+="}
PAIRS = {"(": ")", "[": "]", "{": "}"}
# Conditions of preprocessor blocks that a build for the CPU leaves out.
OTHER_BUILDS = re.compile(r"#\s*if(def)?\b(?!.*!).*(ZERO_CUDA|USE_C10D_NCCL|__CUDA)")
# Texts, traces and assertions of our own invariants: a fault there breaks no promise. The message
# of TORCH_CHECK is left out too, its condition is not.
TEXTS = re.compile(r"\b(TORCH_INTERNAL_ASSERT\w*|TORCH_WARN\w*|static_assert|c10::str|"
                   r"TraceRange \w+)\(")
# Durations and what only a GPU executes: no test of the CPU can see the difference.
UNSEEN = re.compile(r"chrono|millis|seconds\b|cuda|nccl", re.IGNORECASE)
# Calls that only save time.
FAST = re.compile(r"\.reserve\(|notify_one\(")


class Fault(NamedTuple):
    """Replaces text[start:end] of the file by `new`."""
    path: str
    line: int
    kind: str
    start: int
    end: int
    new: str
    before: str  # the lines that the fault touches, joined, without indentation
    after: str   # the same with the fault
    nth: int = 1  # among the equal lines of the file
    config: str = ""  # of Bazel, in which a test sees it

    def text(self):
        return f"{self.path}\n- {self.before}\n+ {self.after}"

    def key(self):
        return self.text() + (f"\n{self.nth}" if self.nth > 1 else "") + self.config

    def applied(self, text):
        return text[:self.start] + self.new + text[self.end:]


def mask(text):
    """`text` at the same length: literals become quotes, comments and directives spaces."""
    def blank(start, end, fill=" "):
        for i in range(start, min(end, len(out))):
            if out[i] != "\n":
                out[i] = fill

    out = list(text)
    token = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|'
                       r"(?<!\w)'(?:\\.|[^'\\\n])+'|(?m:^[ \t]*#(?:\\\n|[^\n])*)", re.DOTALL)
    left_out = []  # one entry per open #if: whether its lines are not compiled for the CPU
    since = 0
    for match in token.finditer(text):
        found = match.group()
        directive = found.lstrip()
        if not directive.startswith("#"):
            blank(match.start(), match.end(), '"' if found[0] in "\"'R" else " ")
            continue
        if any(left_out):
            blank(since, match.start())
        if re.match(r"#\s*if", directive):
            left_out.append(bool(OTHER_BUILDS.match(directive)))
        elif re.match(r"#\s*el", directive):
            left_out[-1] = False
        elif re.match(r"#\s*endif", directive):
            left_out.pop()
        since = match.end()
        blank(match.start(), match.end())
    return "".join(out)


def brackets(masked):
    """{position of a bracket: position of its partner}, both ways."""
    partner, stack = {}, []
    for i, c in enumerate(masked):
        if c in "([{":
            stack.append(i)
        elif c in ")]}" and stack:
            partner[i] = stack.pop()
            partner[partner[i]] = i
    return partner


def top_level(masked, partner, start, end, wanted):
    """Positions of the characters `wanted` in [start, end) that are inside no further bracket."""
    i = start
    while i < end:
        if masked[i] in PAIRS and i in partner:
            i = partner[i]
        elif masked[i] in wanted:
            yield i
        i += 1


def silent_ranges(masked, partner):
    """Ranges that get no fault."""
    for match in TEXTS.finditer(masked):
        yield match.start(), partner[match.end() - 1]
    for match in re.finditer(r"\bTORCH_CHECK\w*\(", masked):
        close = partner[match.end() - 1]
        comma = next(top_level(masked, partner, match.end(), close, ","), close)
        yield comma, close
    for match in re.finditer(r"\btemplate <", masked):
        yield match.start(), masked.find("\n", match.start())
    # The block behind `if (... cuda ...) {`.
    for match in re.finditer(r"\bif \(", masked):
        close = partner[match.end() - 1]
        condition = masked[match.end():close]
        if re.search("cuda", condition, re.IGNORECASE):
            block = masked.startswith(" {", close + 1)
            yield match.start(), partner[close + 2] if block else masked.find(";", close)


def operators(masked, _):
    for match in re.finditer(r"(?<=\s)(<=?|>=?|[=!]=|&&|\|\||[-+]=?|[*/%])(?=\s)", masked):
        around = masked[:match.start()].rstrip()[-1:] + masked[match.end():].lstrip()[:1]
        if '"' not in around:  # else the sum of two texts
            yield "operator", match.start(), match.end(), OPERATORS[match.group()]


def constants(masked, _):
    for match in re.finditer(r"(?<![\w.'])(\d+)(\.\d*)?(e-?\d+)?(?![\w.'])", masked):
        digits, fraction, exponent = match.groups()
        start, end = match.span()
        if exponent:
            yield "constant", start, end, f"({match.group()} + 1)"
        elif fraction:
            yield "constant", start, end, f"{1 - int(digits) if digits in '01' else 0}.0"
        else:
            yield "constant", start, end, str(int(digits) + 1)
            if int(digits) > 0:
                yield "constant", start, end, str(int(digits) - 1)
    for match in re.finditer(r"\b(true|false)\b", masked):
        yield "boolean", *match.span(), "false" if match.group() == "true" else "true"


def conditions(masked, partner):
    for match in re.finditer(r"\b(?:if|while) \(", masked):
        start, end = match.end(), partner[match.end() - 1]
        inside = masked[start:end]
        if not re.search(r";| = ", inside):
            yield "condition", start, end, (inside, "!(", ")")
    for match in re.finditer(r"(?<=[\s(])!(?=[\w(])", masked):
        yield "condition", *match.span(), ""


def statements(masked, partner):
    """Calls whose result is not used, and assignments: dropped."""
    for match in re.finditer(r"[;{}](?=\s)", masked):
        start = match.end()
        opened = enclosing(masked, partner, match.start())
        if masked[match.start()] == "{":
            opened = match.start()
        if opened is None or masked[opened] != "{" or is_scope(masked, opened):
            continue
        start += len(masked[start:]) - len(masked[start:].lstrip())
        while header := re.match(r"(?:if|for|while) \(", masked[start:start + 8]):
            start = partner[start + header.end() - 1] + 1
            start += len(masked[start:]) - len(masked[start:].lstrip())
        end = next(top_level(masked, partner, start, len(masked), ";}"), None)
        if end is None or masked[end] != ";":
            continue
        if "{" in masked[start:end]:
            continue
        body = skeleton(masked, partner, start, end)
        first = re.match(r"\w*", body).group()
        if first in ("return", "throw", "delete", "using", "else", "case") or FAST.search(body):
            continue
        if re.fullmatch(r"(\+\+|--)?\*?[\w.:\[\]]+(->[\w.:\[\]]+)*(\+\+|--)|"
                        r"(\+\+|--)\*?[\w.:\[\]>-]+|"
                        r"\*?[\w.:\[\]()>-]+ [-+*/|&]?= .*|"
                        r"(?!TORCH_INTERNAL|TORCH_WARN)[\w.:\[\]()<>-]+\(\)", body, re.DOTALL):
            yield "statement", start, end + 1, "{}"


def swapped(masked, partner):
    """Neighbours among the arguments of a call."""
    for match in re.finditer(r"([\w>])\(", masked):
        opened = match.end() - 1
        close = partner.get(opened)
        callee = re.search(r"[\w:]+$", masked[:opened])
        if close is None or not callee or callee.group().split("::")[-1] in (
                "if", "for", "while", "switch", "sizeof", "catch", "min", "max"):
            continue
        inside = masked[match.end():close]
        if re.search(r'[<>;{"=]|\w[&*]* [&*]*\w', inside):  # templates, lambdas, texts, declarations
            continue
        cuts = [match.end() - 1, *top_level(masked, partner, match.end(), close, ","), close]
        spans = [(a + 1, b) for a, b in zip(cuts, cuts[1:])]
        for (a, b), (c, d) in zip(spans, spans[1:]):
            pair = masked[a:b].strip(), masked[c:d].strip()
            # Other expressions seldom have the same type.
            if pair[0] != pair[1] and all(re.fullmatch(r"[\w.:>-]+", one) for one in pair):
                yield "arguments", a, d, ("swap", a, b, c, d)


def enclosing(masked, partner, at):
    """The innermost bracket that is open at `at`."""
    depth = at
    while depth > 0:
        depth -= 1
        if masked[depth] in ")]}" and depth in partner:
            depth = partner[depth]
        elif masked[depth] in "([{":
            return depth
    return None


def is_scope(masked, opened):
    """Whether this brace opens a class, an enumeration or a namespace, and no function."""
    head = re.split(r"[;{}]|(?:public|private|protected):", masked[:opened])[-1].strip()
    return bool(re.match(r"(template <.*>\s*)?(class|struct|union|enum|namespace|extern)\b", head,
                         re.DOTALL))


def skeleton(masked, partner, start, end):
    """The text without what is inside its brackets."""
    out, i = [], start
    while i < end:
        out.append(masked[i])
        if masked[i] in PAIRS and i in partner:
            i = partner[i]
            out.append(masked[i])
        i += 1
    return "".join(out)


def faults_of(path, text):
    """All faults of one file."""
    masked = mask(text)
    partner = brackets(masked)
    silent = list(silent_ranges(masked, partner))
    starts = [0] + [m.end() for m in re.finditer("\n", text)]
    for find in (operators, constants, conditions, statements, swapped):
        for kind, start, end, new in find(masked, partner):
            if any(a <= start < b for a, b in silent):
                continue
            if isinstance(new, tuple) and new[0] == "swap":
                _, a, b, c, d = new
                a += len(text[a:b]) - len(text[a:b].lstrip())
                c += len(text[c:d]) - len(text[c:d].lstrip())
                new = text[start:a] + text[c:d] + text[b:c] + text[a:b]
            elif isinstance(new, tuple):
                new = new[1] + text[start:end] + new[2]
            first = text.rfind("\n", 0, start) + 1
            last = text.find("\n", max(start, end - 1))
            before = " ".join(text[first:last].split())
            after = " ".join((text[first:start] + new + text[end:last]).split())
            if not UNSEEN.search(before):
                line = text.count("\n", 0, start) + 1
                yield Fault(path, line, kind, start, end, new, before, after)


def drawn(sources, seed):
    """One fault per line that can have one, in an order that depends on `seed` alone.

    Every such line is as likely as any other to come first, so files get faults in proportion to
    their code. Lines are known by their text: an edit elsewhere does not change what is drawn.
    """
    def rank(*parts):
        return hashlib.sha256("\n".join(map(str, (seed, *parts))).encode()).hexdigest()

    order = []
    for path, text in sources.items():
        lines = {}
        for fault in faults_of(path, text):
            lines.setdefault(fault.line, {}).setdefault(fault.kind, []).append(fault)
        seen = {}
        for _, kinds in sorted(lines.items()):
            kind = min(kinds, key=lambda k: rank(path, k, kinds[k][0].before))
            fault = min(kinds[kind], key=lambda f: rank(f.text()))
            seen[fault.before] = seen.get(fault.before, 0) + 1
            fault = fault._replace(nth=seen[fault.before])
            order.append((rank(path, fault.before, fault.nth), fault))
    return [fault for _, fault in sorted(order)]


def planted(text, sources):
    """The faults of a list: paragraphs of what is wrong, the file and perhaps a --config=, lines
    that begin with "- " and occur once in the file, and lines that begin with "+ " for them."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        path, _, config = lines[1].partition(" ")
        old = "\n".join(line[2:] for line in lines[2:] if line.startswith("-"))
        new = "\n".join(line[2:] for line in lines[2:] if line.startswith("+"))
        if not old or sources[path].count(old) != 1:
            raise SystemExit(f"{path}: expected once, found {sources[path].count(old)} times:\n{old}")
        start = sources[path].index(old)
        found.append(Fault(path, sources[path].count("\n", 0, start) + 1, lines[0], start,
                           start + len(old), new, " ".join(old.split()), " ".join(new.split()),
                           config=config))
    return found
