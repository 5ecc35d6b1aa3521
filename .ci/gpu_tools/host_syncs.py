# SPDX-FileCopyrightText: The zero authors
# SPDX-License-Identifier: Apache-2.0
"""Counts, in a trace of benchmark --trace, how often the host waits for the device in a step."""

import re

STEP = "benchmark::step"
# Calls of the CUDA runtime and driver that return when the device is done.
_WAITS = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize(_v\d+)?")
# A copy into memory that is not pinned returns when it is done, whatever its name is.
_PAGEABLE = re.compile(r"Memcpy \w+ \((Device -> Pageable|Pageable -> Device)\)")
# Not waits by name, but the device is idle before they return.
_STALLS = re.compile(r"cuda(Malloc|Free|HostAlloc|MallocHost|FreeHost|Memcpy|Memset)")


def read(trace, waits_a_step=0):
    """(figures, problem): counts by name inside the steps. No steps or no calls is a problem, and
    more than `waits_a_step`."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # The profiler may show the same range again among those of the device.
    steps = [(event["ts"], event["ts"] + event["dur"]) for event in events
             if event["name"] == STEP and not event.get("cat", "").startswith("gpu")]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    if not steps:
        return {}, f"the trace has no range {STEP}"
    if not calls:
        return {}, "the trace has no calls of the CUDA runtime"

    def inside(event):
        return any(begin <= event["ts"] <= end for begin, end in steps)

    waits, stalls, launches = {}, {}, 0
    for event in filter(inside, calls):
        name = event["name"]
        launches += name.startswith(("cudaLaunch", "cuLaunch"))
        for pattern, counts in ((_WAITS, waits), (_STALLS, stalls)):
            if pattern.fullmatch(name):
                counts[name] = counts.get(name, 0) + 1
    # The device runs later than the host: copies count from the first step to the last.
    for event in copies:
        if steps[0][0] <= event["ts"] and _PAGEABLE.fullmatch(event["name"]):
            waits[event["name"]] = waits.get(event["name"], 0) + 1
    figures = {"steps": len(steps), "launches_per_step": launches / len(steps), "waits": waits,
               "allocations": stalls}
    if sum(waits.values()) > waits_a_step * len(steps):
        return figures, "the host waits: " + ", ".join(f"{n} {name}" for name, n in waits.items())
    return figures, ""
