"""How long planning takes and what it holds: full-size models on full-size clusters, each in a process of its own.

    python benchmarks/planner.py                        every case
    python benchmarks/planner.py --only llama3-8b       those whose name contains it
    python benchmarks/planner.py --growth               instead: time against devices, and against layers

`wall` and `cpu` are those of the whole command `autopar plan`, imports and capture included; on a machine that does
other work too, cpu is the one to compare. `peak` is the largest resident memory of that process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from planning import LLAMA3_8B, LLAMA3_70B, LLAMA3_405B, Case, gpt, plan

PEAK_GIB = 6.0  # no planner may hold more

CASES = (
    Case("llama3-8b/8xh100", LLAMA3_8B, "8xh100", 8192, 64, 20),
    Case("llama3-8b/64xh100", LLAMA3_8B, "8x8xh100", 8192, 512, 20),
    Case("llama3-70b/256xh100", LLAMA3_70B, "32x8xh100", 8192, 512, 45),
    Case("llama3-70b/512xh100", LLAMA3_70B, "64x8xh100", 8192, 1024, 45),
    Case("gpt3-175b/1024xa100", gpt(96, 12288, 96), "128x8xa100-80", 2048, 1536, 60),
    Case("llama3-405b/16384xh100", LLAMA3_405B, "2048x8xh100", 8192, 2048, 120),
)


DEVICES = (8, 64, 512, 4096, 16384)
LAYERS = (12, 24, 48, 96, 126)


def grown() -> Iterator[Case]:
    """Llama-3-8B on ever more devices, of 64 rows each at most; then ever more of its layers on 64."""
    for devices in DEVICES:
        yield Case(f"{devices} devices", LLAMA3_8B, f"{devices // 8}x8xh100", 8192, min(64 * devices, 16384))
    for layers in LAYERS:
        yield Case(f"{layers} layers", LLAMA3_8B | {"num_hidden_layers": layers}, "8x8xh100", 8192, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", default="", help="cases whose name contains it")
    parser.add_argument("--growth", action="store_true", help="time against devices, and against layers")
    options = parser.parse_args()
    every = tuple(grown()) if options.growth else CASES
    chosen = [case for case in every if options.only in case.name]
    if not chosen:
        parser.error(f"no such case; there are {'; '.join(case.name for case in every)}")
    print(f"{'':22}{'wall s':>8}{'cpu s':>8}{'target s':>10}{'peak GiB':>10}        plan")
    missed = 0
    for case in chosen:
        one = plan(case)
        met = one.plan is not None and one.wall_s <= case.target_s and one.peak_gib <= PEAK_GIB
        missed += not met
        times = f"{one.wall_s:8.1f}{one.cpu_s:8.1f}{case.target_s:10.0f}{one.peak_gib:10.2f}"
        print(f"{case.name:22}{times}  {'pass' if met else 'MISS'}  {one}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} within their seconds and {PEAK_GIB:g} GiB")


if __name__ == "__main__":
    main()
