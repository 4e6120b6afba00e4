"""Models with random weights, by shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tierkv.errors import ConfigError
from tierkv.hf import shapes
from tierkv.hf.geometry import model_geometry

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [("llama-3.1-8b", 8.03, 128), ("llama-3.2-1b", 1.24, 32), ("qwen2.5-7b-1m", 7.62, 56),
     ("llama-3-70b", 70.55, 320)],
)  # fmt: skip
def test_named_shapes_have_the_size_of_their_models(
    name: str, billions: float, kv_kib: int
) -> None:
    config = shapes.shape_config(name)
    weights = shapes.weight_bytes(config, torch.bfloat16)
    assert weights / 2e9 == pytest.approx(billions, abs=0.01)
    geometry = model_geometry(config, torch.bfloat16)
    assert geometry is not None
    assert geometry.token_bytes == kv_kib << 10


def test_layers_are_cut_to_fit() -> None:
    config = shapes.shape_config("llama-3-70b")
    cut = shapes.cut_to_fit(config, torch.bfloat16, 80 << 30)
    assert config.num_hidden_layers == 80, "the given configuration is left alone"
    assert 40 < cut.num_hidden_layers < 80
    assert shapes.weight_bytes(cut, torch.bfloat16) <= 80 << 30
    more = shapes._with_layers(config, cut.num_hidden_layers + 1)
    assert shapes.weight_bytes(more, torch.bfloat16) > 80 << 30
    assert shapes.cut_to_fit(config, torch.bfloat16, 1 << 40) is config
    with pytest.raises(ConfigError, match="one layer takes"):
        shapes.cut_to_fit(config, torch.bfloat16, 1 << 30)


def test_weights_are_bf16_and_rotary_frequencies_are_not() -> None:
    model = shapes.random_model(shapes.shape_config("tiny"), CPU, torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    rotary = [buffer.dtype for name, buffer in model.named_buffers() if "inv_freq" in name]
    assert rotary
    assert set(rotary) == {torch.float32}
    assert float(model.model.layers[0].mlp.up_proj.weight.detach().float().std()) > 0


def test_shape_from_a_file(tiny_model_dir: Path, tmp_path: Path) -> None:
    for path in (tiny_model_dir, tiny_model_dir / "config.json"):
        assert shapes.shape_config(str(path)).num_hidden_layers == 2
    with pytest.raises(ConfigError, match=r"'gpt-9' is none of llama-3.1-8b"):
        shapes.shape_config("gpt-9")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        shapes.shape_config(str(tmp_path))
