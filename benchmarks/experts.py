"""Our plans against published ones: the same model, batch and cluster, both priced by our own costs.

    python benchmarks/experts.py                     every published configuration (about half an hour)
    python benchmarks/experts.py --only mt-nlg       those whose name contains it

Each configuration is planned twice: once with what was published fixed, once with everything left to the search. What
was not published is left to the search both times. A plan of ours that is slower, or that does not fit, is a MISS.

Sources: Megatron-LM, SC'21, Table 1 (arXiv:2104.04473; microbatches and virtual stages from examples/sc21 of
NVIDIA/Megatron-LM 79a3bb6); Korthikanti et al., Tables 3 and 5 (arXiv:2205.05198), whose selective recompute is none
here, since the attention core that it recomputes keeps nothing with fused attention; Megatron-Turing NLG 530B, section
3 (arXiv:2201.11990); The Llama 3 Herd of Models, Table 4 (arXiv:2407.21783), whose FSDP without resharding is ZeRO-2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planning import LLAMA3_405B, Case, Planned, gpt, plan

DEVICES_PER_NODE = 8
SLACK = 1e-6  # two prices that differ by less are one
LOST = {
    "compute": "compute",
    "tp_comm": "tp communication",
    "dp_comm": "dp communication",
    "pp_comm": "pp communication",
    "bubble": "bubble",
    "recompute": "recompute",
    "optimizer": "optimizer step",
}

# parameters, layers, hidden, heads, tp, pp, virtual stages, devices, batch, microbatch
SC21 = (
    ("1.7b", 24, 2304, 24, 1, 1, 1, 32, 512, 16),
    ("3.6b", 30, 3072, 32, 2, 1, 1, 64, 512, 16),
    ("7.5b", 36, 4096, 32, 4, 1, 1, 128, 512, 16),
    ("18.4b", 40, 6144, 48, 8, 1, 1, 256, 1024, 8),
    ("39.1b", 48, 8192, 64, 8, 2, 1, 512, 1536, 4),
    ("76.1b", 60, 10240, 80, 8, 4, 3, 1024, 1792, 2),
    ("145.6b", 80, 12288, 96, 8, 8, 2, 1536, 2304, 2),
    ("310.1b", 96, 16384, 128, 8, 16, 2, 1920, 2160, 1),
    ("529.6b", 105, 20480, 128, 8, 35, 3, 2520, 2520, 1),
    ("1008b", 128, 25600, 160, 8, 64, 1, 3072, 3072, 1),
)
KORTHIKANTI = (
    ("22b", 48, 6144, 64, 8, 1, 1, 8, 4, 4),
    ("175b", 96, 12288, 96, 8, 8, 3, 64, 64, 1),
    ("530b", 105, 20480, 128, 8, 35, 3, 280, 280, 1),
    ("1t", 128, 25600, 160, 8, 64, 1, 512, 512, 1),
)
MT_NLG = tuple(("530b", 105, 20480, 128, 8, 35, 1, devices, 1920, 1) for devices in (2240, 2800, 3360))


def megatron(
    source: str, recompute: str, size: str, layers: int, hidden: int, heads: int, tp: int, pp: int, virtual: int,
    devices: int, batch: int, microbatch: int,
) -> Case:  # fmt: skip
    """A GPT on A100 with everything replicated over dp."""
    fix: dict[str, int | str] = {"pp": pp, "dp": devices // (tp * pp), "tp": tp, "zero": 0, "microbatch": microbatch}
    if pp > 1:
        fix |= {"schedule": "interleaved" if virtual > 1 else "1f1b", "virtual_stages": virtual}
    return Case(
        f"{source} {size}/{devices}xa100",
        gpt(layers, hidden, heads),
        f"{devices // DEVICES_PER_NODE}x{DEVICES_PER_NODE}xa100-80",
        2048,
        batch,
        fix=fix | {"recompute": recompute},
    )


def llama(dp: int) -> Case:
    devices = 8 * 16 * dp
    return Case(
        f"llama-3 405b/{devices}xh100",
        LLAMA3_405B,
        f"{devices // DEVICES_PER_NODE}x{DEVICES_PER_NODE}xh100",
        8192,
        2048,
        fix={"pp": 16, "dp": dp, "tp": 8, "zero": 2, "microbatch": 1, "schedule": "interleaved"},
    )


def cases() -> Iterator[Case]:
    """Every published configuration, the plan fixed."""
    yield from (megatron("sc21", "full", *row) for row in SC21)
    yield from (megatron("korthikanti-full", "full", *row) for row in KORTHIKANTI)
    yield from (megatron("korthikanti-selective", "none", *row) for row in KORTHIKANTI)
    yield from (megatron("mt-nlg", "full", *row) for row in MT_NLG)
    yield from (llama(dp) for dp in (64, 128))


def why(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Where the published plan loses and gains most against ours, in shares of our step."""
    more = {k: (theirs["time_s"][k] - ours["time_s"][k]) / ours["step_time_s"] for k in LOST}
    parts = sorted((k for k in LOST if abs(more[k]) >= 0.005), key=lambda k: -abs(more[k]))
    return ", ".join(f"{LOST[k]} {100 * more[k]:+.1f} %" for k in parts[:4]) or "nothing"


def verdict(case: Case, theirs: Planned, ours: Planned) -> tuple[bool, str]:
    """Whether ours is as good as it must be, and the row's last line."""
    if ours.plan is None:
        return False, "MISS: no plan of ours"
    if theirs.plan is None:
        return True, "pass: the published plan is not possible by our costs"
    ratio = theirs.plan["step_time_s"] / ours.plan["step_time_s"]
    met = ratio >= 1 - SLACK
    return met, f"{'pass' if met else 'MISS'}: {ratio:.3f} times ours: {why(theirs.plan, ours.plan)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", default="", help="configurations whose name contains it")
    only = parser.parse_args().only
    chosen = [case for case in cases() if only in case.name]
    if not chosen:
        parser.error(f"no such configuration; there are {'; '.join(case.name for case in cases())}")
    missed = 0
    own: dict[tuple[str, str, int], Planned] = {}  # of what two sources share
    for case in chosen:
        theirs = plan(case)
        key = str(case.config), case.cluster, case.global_batch
        ours = own[key] = own.get(key) or plan(replace(case, fix={}))
        met, said = verdict(case, theirs, ours)
        missed += not met
        print(f"{case.name}\n    published  {theirs}\n    ours       {ours}\n    {said}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)}: ours is no slower and fits")


if __name__ == "__main__":
    main()
