"""`auto` takes bfloat16 only where the processor multiplies it: emulated, reading a prompt takes minutes."""

import pytest
import torch

from headstart.eval.timings import choose_speed_dtype
from headstart.heads import precision
from headstart.heads.settings import TargetSettings
from headstart.heads.target import TargetLoader

CPU = torch.device("cpu")


@pytest.mark.parametrize(("native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_only_where_it_is_native(monkeypatch, native, expected):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: native)
    assert precision.choose_precision("auto", CPU).name == expected
    assert TargetLoader(TargetSettings(model="tiny", device="cpu")).dtype == expected
    for asked in precision.DTYPES:  # who asks for one gets it
        assert precision.choose_precision(asked, CPU).name == asked


def test_timing_does_not_try_a_precision_that_is_emulated(monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: False)

    def never(dtype):
        raise AssertionError(f"loaded the target in {dtype}")

    assert choose_speed_dtype(never, "auto", [1, 2], CPU) == ("float32", {})
