"""Which selectors run where."""

from __future__ import annotations

import pytest
import torch

from tierkv.config import Config
from tierkv.errors import ConfigError
from tierkv.kernels.build import Availability, source_directory
from tierkv.page import Geometry
from tierkv.selection import SELECTORS, selector, settings

GEOMETRY = Geometry(4, 2, 64, 64, torch.bfloat16)


@pytest.mark.parametrize("name", SELECTORS)
def test_a_gpu_takes_selectors_with_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "available", lambda: Availability())
    config, device = Config(attention="selective", selector=name), torch.device("cuda", 0)
    if name == "oracle":
        with pytest.raises(ConfigError, match="'oracle' runs on a CPU only"):
            settings.selective_settings(config, GEOMETRY, device, 4096)
        return
    spec = settings.selective_settings(config, GEOMETRY, device, 4096)
    kernel = spec.selector.kernel
    assert spec.parts == selector(name).parts
    assert (kernel is None) == (name == "window")  # which scores nothing
    assert kernel is None or (source_directory() / f"{kernel}.cu").is_file()


def test_pages_that_a_selector_cannot_summarize_are_refused() -> None:
    """Bug: `cuboid8` with head dims that are no multiples of 8 ended prefill with an assertion."""
    config = Config(attention="selective", selector="cuboid8")
    cpu = torch.device("cpu")
    for k_dim, dtype in ((12, torch.bfloat16), (20, torch.float16), (2, torch.float32)):
        with pytest.raises(ConfigError, match=f"{k_dim} channels.*use 'cuboid'"):
            settings.selective_settings(config, Geometry(4, 2, k_dim, 64, dtype), cpu, 4096)
    spec = settings.selective_settings(config, Geometry(4, 2, 12, 64, torch.float32), cpu, 4096)
    assert spec.parts == 1
