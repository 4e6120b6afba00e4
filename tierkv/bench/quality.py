"""How much selective attention or a codec changes what a model says: a continuation, needles.

Where anything selects, every token that is scored comes from a decode step. Of encoded
contexts every whole page has been through the codec, as if none were hot; pages that the
continuation itself fills stay raw.
What each layer recovers of its own attention stands beside it (`layers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tierkv.bench import layers, needles
from tierkv.bench.forced import Forced, Setting, forced
from tierkv.bench.workload import Progress
from tierkv.config import Config
from tierkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Options:
    """What to evaluate; see the flags of ``tierkv eval``.

    `tokens` of context, `continuation` tokens predicted after it (0: none), `needles` seeds (0:
    none); `tiers` are further settings of `tierkv.wrap`.
    """

    text: str
    tokens: int
    continuation: int
    needles: int
    selectors: tuple[str, ...]
    budgets: tuple[int, ...]
    codecs: tuple[str, ...] = ()
    tiers: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> list[Setting]:
        """Return what is compared, exact attention first."""
        encoded = [Setting(codec=name) for name in self.codecs if name != "raw"]
        selecting = [Setting(name, n) for name in self.selectors for n in self.budgets]
        return [Setting(), *encoded, *selecting]


def run(
    model: Any,
    tokenizer: Any,
    options: Options,
    say: Progress,
    save: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Evaluate everything and return the report; `save` gets it after every part as well.

    Raises:
        ConfigError: the text is too short; names the flag.
    """
    report: dict[str, Any] = {"benchmark": "quality", "tokens": options.tokens}
    report |= {"settings": dict(options.tiers), "layers": [], "layers_left_out": ""}
    report |= {"continuation": [], "needles": []}
    ids = torch.tensor([text_ids(tokenizer, options.text)], device=model.device)
    need = options.tokens + options.continuation
    if options.continuation:
        if ids.shape[1] < need:
            raise ConfigError(
                f"--text has {ids.shape[1]} tokens; --tokens {options.tokens} and --continuation "
                f"{options.continuation} need {need}"
            )
        exact = None
        for found in forced(
            model, ids[:, :need], options.tokens - 1, options.settings(), options.tiers, say
        ):
            exact = found if exact is None else exact
            report["continuation"].append(row(found, exact, ids[0, options.tokens : need].cpu()))
            save(report)
    if options.selectors or not options.codecs:
        try:
            looked_into = layers.traces(model, ids[:, :need], options.tiers, say)
            config = Config.from_kwargs(**options.tiers)
            names = tuple(dict.fromkeys(("oracle", *options.selectors)))
            report["layers"] = layers.measure(looked_into, names, options.budgets, config, say)
        except layers.NotModelledError as error:
            report["layers_left_out"] = str(error)
        save(report)
    if options.needles:
        report["needles"] = needles.run(
            model, tokenizer, options.text, options.tokens, options.needles, options.settings(),
            options.tiers, say, lambda rows: save({**report, "needles": rows}),
        )  # fmt: skip
    save(report)
    return report


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text, with what the tokenizer itself puts first."""
    return [int(token) for token in tokenizer(text).input_ids]


def row(found: Forced, exact: Forced, targets: torch.Tensor) -> dict[str, Any]:
    """Compare one setting with exact attention over the true tokens ``[steps]``."""
    want, got = exact.logits.log_softmax(-1), found.logits.log_softmax(-1)
    nll = [-x.gather(1, targets[:, None]).mean().item() for x in (got, want)]
    kl = (want.exp() * (want - got)).sum(-1)
    return {
        **found.setting.row(),
        "perplexity": math.exp(nll[0]),
        "perplexity_ratio": math.exp(nll[0] - nll[1]),
        "top1_agreement": (got.argmax(-1) == want.argmax(-1)).float().mean().item(),
        "kl": kl.mean().item(),
        "tokens_read": found.tokens_read,
        "kv_share": found.kv_share,
        "steps": len(targets),
        "seconds": found.seconds,
        "bytes_per_token": found.bytes_per_token,
        **({} if found.damage is None else found.damage.worst()),
    }
