"""What a row of the benchmark measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tierkv.bench import systems


def test_a_row_replays_only_what_generate_would(monkeypatch: Any) -> None:
    """Bug: a row asked once whether steps can be replayed, and replayed a step that had failed."""
    said = iter(["", "", "a replay's logits differ from the model's own"])
    graph = SimpleNamespace(obstacle=lambda: next(said), step=lambda token: "replayed")
    monkeypatch.setattr(systems, "decode_graph", lambda *_: graph)
    monkeypatch.setattr(systems.workload, "step", lambda *_: "eager")
    options: Any = SimpleNamespace(eager=False)
    model: Any = torch.nn.Linear(1, 1)
    monkeypatch.setattr(systems, "_bytes_per_step", lambda _: 0)
    made = systems.Systems(model, None, options, None, None)
    wrapped: Any = SimpleNamespace(config=None)
    run = made.step_of(wrapped, None, 64)
    token = torch.ones((1, 1), dtype=torch.long)
    assert [run(token) for _ in range(3)] == ["replayed", "replayed", "eager"]
    options.eager = True
    assert made.step_of(wrapped, None, 64)(token) == "eager"
