"""One run of the offload benchmark: the ceiling, then every shape, context and hot share.

Baselines use the same model object, unwrapped, in the same run. transformers' offloaded cache
comes last for each shape, because it may take the process down when host memory runs out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from tierkv.bench import ceiling, memory, workload
from tierkv.bench.options import Options
from tierkv.bench.summary import OFFLOADED, STOCK, TIERKV, add_speedups, goals, hot_label
from tierkv.bench.systems import SkippedError, Systems
from tierkv.bench.workload import Progress
from tierkv.errors import BudgetError, ConfigError, TierKVError
from tierkv.hf import shapes
from tierkv.hf.geometry import model_geometry

WEIGHT_SHARE = 0.6
"""Of device memory that weights may take; a larger model loses layers."""


def run(options: Options, say: Progress, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure everything and return the report; `save` gets it after every row as well.

    Raises:
        ConfigError: a shape cannot be used.
        TierKVError: tierkv's logits differ from those of `DynamicCache`; nothing was timed.
    """
    report: dict[str, Any] = {"benchmark": "offload", "weights": "random", "checks": []}
    report["ceiling"], report["rows"], report["skipped"] = None, [], []
    say("ceiling", 0, 1)
    limits = ceiling.measure(options.device, options.store, scale=options.scale)
    memory.give_back()
    report["ceiling"] = {**asdict(limits), "unit": "bytes per second"}
    for name, contexts in options.shapes:
        ShapeRun(name, contexts, options, limits, report, say, save).run()
    add_speedups(report["rows"])
    report["goals"] = goals(report["rows"])
    save(report)
    return report


class ShapeRun:
    """All rows of one shape, on one model."""

    def __init__(
        self,
        name: str,
        contexts: tuple[int, ...],
        options: Options,
        limits: ceiling.Ceiling,
        report: dict[str, Any],
        say: Progress,
        save: Callable[[dict[str, Any]], None],
    ):
        self.name, self.contexts, self.options, self.limits = name, contexts, options, limits
        self.report, self._say, self._save = report, say, save
        self.what = name
        config = shapes.shape_config(name)
        say(f"{name}: random weights", 0, 1)
        room = int(WEIGHT_SHARE * memory.total_device_bytes(options.device))
        kept = shapes.cut_to_fit(config, options.dtype, room)
        self.layers = (kept.num_hidden_layers, config.num_hidden_layers)
        geometry = model_geometry(kept, options.dtype, options.page_tokens)
        if geometry is None or geometry.layers != kept.num_hidden_layers:
            raise ConfigError(f"shape {name}: every layer must have full attention to be filled")
        model = shapes.random_model(kept, options.device, options.dtype)
        self.systems = Systems(model, geometry, options, limits, self.say)

    def run(self) -> None:
        """Check, then measure; what cannot be measured is reported with the reason."""
        options, systems = self.options, self.systems
        checked = workload.check(systems.model, systems.geometry, systems.wrap, systems.step_of)
        self.report["checks"].append({"shape": self.name, **checked})
        self._save(self.report)
        if not checked["ok"]:
            raise TierKVError(
                f"{self.name}: logits differ from DynamicCache by "
                f"{checked['relative_logit_error']:.3g} (one wrong page makes "
                f"{checked['error_with_one_page_wrong']:.3g}); nothing was timed"
            )
        for tokens in self.contexts:
            for share in options.hot_shares:
                for codec in options.codecs if share < 1 else ("raw",):
                    self._measure(TIERKV, tokens, share, codec)
            if STOCK in options.baselines:
                self._measure(STOCK, tokens, 1.0)
        if OFFLOADED in options.baselines:
            for tokens in self.contexts:
                self._measure(OFFLOADED, tokens, 0.0)
        del self.systems, systems
        memory.give_back()

    def _measure(self, system: str, tokens: int, share: float, codec: str = "raw") -> None:
        of = f" {hot_label(share)}" if system == TIERKV else ""
        of += "" if codec == "raw" else f" {codec}"
        self.what = f"{self.name} {tokens // 1024}K {system}{of}"
        memory.give_back()
        reset = memory.reset_peaks(self.options.device)
        row: dict[str, Any] = {
            "shape": self.name,
            "layers": self.layers[0],
            "layers_of_shape": self.layers[1],
            "tokens": tokens,
            "system": system,
            "exact": True,
            "codec": codec,
            "dtype": str(self.options.dtype).removeprefix("torch."),
            "hot_share": share,
            "kv_bytes": tokens * self.systems.geometry.token_bytes,
            "host_peak_since": "row" if reset else "process",
        }
        try:
            row |= self.systems.measure(system, tokens, share, codec)
        except (SkippedError, BudgetError, torch.OutOfMemoryError) as error:
            reason = " ".join(str(error).split())[:300]
            self.report["skipped"].append(
                {"shape": self.name, "tokens": tokens, "system": system, "hot_share": share,
                 "codec": codec, "reason": reason}
            )  # fmt: skip
            self.say(f"skipped: {reason}", 1, 1)
            return
        row["peak_host_bytes"] = memory.peak_host_bytes()
        self.report["rows"].append(row)
        add_speedups(self.report["rows"])
        self._save(self.report)

    def say(self, text: str, done: int, total: int) -> None:
        """Report progress of what is being measured."""
        self._say(f"{self.what}: {text}", done, total)
