import subprocess
import sys

import pytest

from costmodels.devices import ALIASES, CATALOGUE, GIB, device_named
from costmodels.errors import BadInput

SHORT_NAMES = (
    "v100",
    "a100-40",
    "a100-80",
    "h100",
    "h100-hbm2e-96",
    "h200",
    "b200",
    "gb200",
    "mi300x",
    "l4",
    "l40s",
    "rtx4090",
    "a10g",
)


def test_every_short_name_is_a_catalogue_device() -> None:
    assert sorted(ALIASES) == sorted(SHORT_NAMES)
    assert {ALIASES[name] for name in SHORT_NAMES} == CATALOGUE.keys() - {"cpu"}


def test_short_and_canonical_names_give_the_same_device_in_any_case() -> None:
    assert device_named("H100") is device_named("h100-sxm-80") is CATALOGUE["h100-sxm-80"]


def test_unknown_device_names_the_nearest() -> None:
    with pytest.raises(BadInput) as error:
        device_named("h10")
    assert str(error.value) == "unknown device 'h10'; the nearest known: h100, v100, h200"


def test_peak_is_dense() -> None:
    assert device_named("h100").peak_flop_per_s("bf16") == 989e12
    assert device_named("l4").peak_flop_per_s("bf16") == 121e12


def test_v100_has_no_bf16() -> None:
    with pytest.raises(BadInput, match=r"^v100-sxm-32 has no bf16 arithmetic; use one of fp16, fp32$"):
        device_named("v100").peak_flop_per_s("bf16")


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=list(CATALOGUE))
def test_units_are_plausible(device) -> None:
    if device.kind == "cpu":
        return
    assert 20 * GIB < device.memory_bytes < 200 * GIB
    assert 0.2e12 < device.memory_bytes_per_s < 10e12
    assert 1e9 < device.inter_node.bytes_per_s < device.intra_node.bytes_per_s < 1e12
    assert 1e-6 < device.intra_node.latency_s < 1e-4
    assert 10e12 < device.peak_flop_per_s("fp32") <= device.peak_flop_per_s("fp16") < 3e15
    assert 0.3 < device.efficiency.matmul.peak_fraction < 1
    assert device.source


def test_nothing_else_of_the_project_and_no_torch_is_loaded() -> None:
    program = (
        "import sys, costmodels.cluster, costmodels.collectives, costmodels.memory, costmodels.operators\n"
        "print([name for name in ('torch', 'passes', 'autopar') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
