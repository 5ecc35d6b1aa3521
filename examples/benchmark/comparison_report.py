# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""The tables and the chart of the comparisons of this folder."""

import html
import statistics

from comparison_runs import BASE

# Relative distance to one plain process. torch's fp32 norm is 3e-5 low on the MLP; bf16 systems
# round at different places, and FSDP2's parameters are its fp32 masters.
_FIRST = {"norm_first": 1e-4, "l2_1": 1e-6, "dot_1": 1e-4}
_LAST = {"loss_last": 1e-4, "norm_last": 1e-3, "param_l2": 1e-6, "param_dot": 1e-4}
_BF16 = {"norm_first": 1e-4, "l2_1": 1e-4, "dot_1": 5e-3, "loss_last": 3e-2, "param_l2": 1e-3}
# zero sums gradients in fp32 and squares in fp64, in every dtype. On a GPU gradients differ before.
_OWN_NORM = 1e-6
# Gradients that were rounded on the way.
_WIRE = {"norm_first": 1e-3, "l2_1": 1e-4, "dot_1": 2e-2, "loss_last": 3e-2, "norm_last": 0.2,
         "param_l2": 1e-3, "param_dot": 5e-2}
# Muon orthogonalises in bf16, and zero with other roundings than Python: zero/muon.h says by how much.
_MUON = {"dot_1": 5e-3}


def tolerances(workload, steps):
    if workload.endswith("bf16"):
        return _BF16
    # The MLP's later values are chaotic; the GPT's are defined after 15 steps.
    return {**_FIRST, **_LAST} if workload.startswith("gpt") and steps == 12 else _FIRST


def by_name(cell):
    groups = {}
    for line in cell["runs"]:
        groups.setdefault(line["name"], []).append(line)
    return groups


def ratios(cell, name):
    """Times of `name` over DDP's of the same turn."""
    base = {line["turn"]: line["median_ms"] for line in cell["runs"] if line["name"] == BASE}
    return [line["median_ms"] / base[line["turn"]]
            for line in cell["runs"] if line["name"] == name and line["turn"] in base]


def median(lines, field):
    return statistics.median(line[field] for line in lines)


def _short(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _median_of(field):
    return lambda cell, name, lines: _short(median(lines, field))


def _sent_mb(cell, name, lines):
    # The least, since PyTorch's are counted at the interface, where others send too.
    return f"{min(line['bytes_sent'] for line in lines) / 1e6:.0f}"


# What each column has of (cell, name of a system, its runs), beside the time.
PHASES = {"fb": _median_of("fb_ms"), "clip": _median_of("clip_ms"), "opt": _median_of("opt_ms"),
          "cpu ms": _median_of("cpu_ms")}
MEMORY = {"kept MB": _median_of("anon_growth_mb"), "peak MB": _median_of("rss_growth_mb")}
LOCAL_COLUMNS = {**PHASES, "sent MB": _sent_mb, **MEMORY}
# On a GPU the phases are what the host needs to enqueue the work.
GPU_COLUMNS = {**PHASES, "GPU MB": _median_of("device_growth_mb")}


def columns_of(results):
    on_gpu = any(cell.get("device") == "cuda" for cell in results["cells"])
    return GPU_COLUMNS if on_gpu else LOCAL_COLUMNS


def time_table(cell, columns):
    titles = ["ms", "ratio to DDP", "lowest - highest", *columns]
    rows = ["| system | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(titles)]
    for name, lines in by_name(cell).items():
        of_base = ratios(cell, name)
        shown = ["-", "-"]
        if of_base:
            shown = [f"{statistics.median(of_base):.2f}",
                     f"{min(of_base):.2f} - {max(of_base):.2f}"]
        values = [_short(median(lines, "median_ms")), *shown,
                  *(column(cell, name, lines) for column in columns.values())]
        rows.append(f"| {name} | " + " | ".join(values) + " |")
    return "\n".join(rows)


def differences(cell, steps):
    """[(name, field, relative difference, allowed)] against the plain process."""
    plain = cell["plain"]
    found = []
    runs = by_name(cell)
    if cell.get("world") != 1:
        runs.pop("one process", None)  # it has other data: that of one rank
    # On a GPU two runs of one program differ too, so that PyTorch's are the measure.
    base = ([line for name in (BASE, "one process") for line in runs.get(name, [])]
            if cell.get("device") == "cuda" else [])
    for name, lines in runs.items():
        for field, allowed in tolerances(cell["workload"], steps).items():
            # Norms are held against fp64 sums, which the plain process makes once.
            truth = plain[field]
            if field == "norm_first":
                truth = plain["norm_first_fp64"]
                own = name.startswith("zero") and cell.get("device") != "cuda"
                allowed = _OWN_NORM if own else allowed
            if name.endswith(" wire"):
                allowed = _WIRE[field]
            if cell["workload"].endswith("_muon") and name.startswith("zero"):
                allowed = _MUON.get(field, allowed)
            for line in base:
                allowed = max(allowed, 4 * abs(line[field] - truth) / abs(truth))
            worst = max(abs(line[field] - truth) / abs(truth) for line in lines)
            found.append((name, field, worst, allowed))
    return found


def check_table(cell, steps):
    fields = list(tolerances(cell["workload"], steps))
    plain = cell["plain"]
    rows = ["| relative difference to one plain process | " + " | ".join(fields) + " |",
            "|---|" + "---:|" * len(fields),
            "| the plain process | " + " | ".join(
                f"{plain['norm_first_fp64' if f == 'norm_first' else f]:.7g}"
                for f in fields) + " |"]
    cells = {}
    for name, _, worst, allowed in differences(cell, steps):
        mark = "" if worst <= allowed else " DIFFERS"
        cells.setdefault(name, []).append(f"{worst:.1e}{mark}")
    rows += [f"| {name} | " + " | ".join(values) + " |" for name, values in cells.items()]
    return "\n".join(rows)


def agrees(results):
    """Whether every system trained the same as the plain process, and none failed."""
    return all(not cell["errors"] and all(worst <= allowed for _, _, worst, allowed
                                          in differences(cell, results["steps"]))
               for cell in results["cells"])


def title(cell):
    if "hosts" not in cell:
        over = f" over {cell['transport']}" if "transport" in cell else ""
        return f"{cell['workload']}, {cell['world']} ranks{over}"
    return (f"{cell['workload']}, {cell['hosts']} hosts of {cell['ranks_per_host']} ranks, "
            f"links {'unlimited' if cell['rate'] == 'none' else cell['rate']}")


def tables(results, columns):
    about = results["environment"]
    lines = ["; ".join(f"{name} {value}" for name, value in about.items()), ""]
    for cell in results["cells"]:
        loads = [line["load"] for line in cell["runs"]]
        lines.append(f"### {title(cell)}")
        lines.append("")
        lines.append(f"{results['steps']} timed steps a run, medians of "
                     f"{max((line['turn'] for line in cell['runs']), default=-1) + 1} turns; load "
                     f"average before a run {min(loads, default=0):.1f} to "
                     f"{max(loads, default=0):.1f} on {about['cores']} cores.")
        lines += ["", time_table(cell, columns), "", check_table(cell, results["steps"]), ""]
        lines += [f"FAILED {error}" for error in cell["errors"]]
    return "\n".join(lines)


def _bar(x, y, scale, cell, name):
    """One bar: the median ratio, with a line from the lowest to the highest."""
    values = ratios(cell, name)
    middle = statistics.median(values)
    ms = median(by_name(cell)[name], "median_ms")
    colour = "#1f6f8b" if name.startswith("zero") else "#9aa5ad"
    low, high = x + scale * min(values), x + scale * max(values)
    label = html.escape(name)
    return [f'<text x="{x - 8}" y="{y + 12}" text-anchor="end">{label}</text>',
            f'<rect x="{x}" y="{y}" width="{scale * middle:.1f}" height="15" fill="{colour}"/>',
            f'<line x1="{low:.1f}" y1="{y + 7.5}" x2="{high:.1f}" y2="{y + 7.5}" '
            'stroke="#222" stroke-width="1.5"/>',
            f'<text x="{max(high, x + scale * middle) + 6:.1f}" y="{y + 12}" '
            'stroke="white" stroke-width="4" paint-order="stroke">'
            f'{middle:.2f} ({ms:.0f} ms)</text>']


def chart(results):
    """An SVG: a panel per workload and number of ranks, a bar per system."""
    left, width, gap = 250, 420, 21
    body, y = [], 24
    for cell in results["cells"]:
        names = [name for name in by_name(cell) if ratios(cell, name)]
        if not names:
            continue
        largest = max(max(ratios(cell, name)) for name in names)
        scale = width / largest
        body.append(f'<text x="{left}" y="{y}" font-weight="bold">{title(cell)}: '
                    'time of a step, DDP = 1</text>')
        y += 10
        body.append(f'<line x1="{left + scale:.1f}" y1="{y - 3}" x2="{left + scale:.1f}" '
                    f'y2="{y + gap * len(names) - 3}" stroke="#c0392b" stroke-dasharray="4 3"/>')
        for name in names:
            body += _bar(left, y, scale, cell, name)
            y += gap
        y += 30
    about = results["environment"]
    note = f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, {about['date']}"
    body.append(f'<text x="{left}" y="{y}" fill="#666">{html.escape(note)}</text>')
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 130}" '
            f'height="{y + 16}" font-family="sans-serif" font-size="12">\n'
            '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n")
