"""What selective attention loses, and how local its choices are, on the layers of a real model.

Regime: one dense forward over real text (SmolLM2-135M, about 7K tokens, float32, CPU); the last
tokens are taken as decode steps, fed token by token from the text. Every layer is compared with
itself: queries, K and V are those of the dense run, so errors do not add up over layers, and no
claim about answers follows. Budgets are tokens per KV head and step, besides 64 sink and 64
recent tokens; at 7K a budget of 2048 is a third of the context, at 128K it would be 1.6%: both
mass and hit rates are flattered by short contexts. `window` gets the budget as more recent tokens.
The ceiling is `oracle`: the pages of largest true mass, averaged over the heads of a group.
The last line of stdout is one JSON object.

    python benchmarks/selection_quality.py --plot quality.png --trace locality.json
"""

from __future__ import annotations

import argparse
import importlib.resources
import inspect
import json
import pydoc_data.topics
import statistics
import sys
import sysconfig
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from tierkv.hf.loading import load_model
from tierkv.selection import DEFAULT, SELECTORS, selector
from tierkv.selection.quality import (
    Regime,
    Trace,
    attention,
    estimate,
    overlap,
    recovered,
    reuse_misses,
    select,
)

PREDICT_PAGE = 32
"""Page size at which predictions and mass targets are measured."""

FIRST_GUESSED = 2
"""First layer that two layers ahead can be guessed for; guesses are averaged from here on."""

TARGETS = (0.8, 0.9, 0.95, 0.99)

Key = tuple[Any, ...]
Values = dict[Key, dict[int, list[float]]]
"""What was measured -> layer -> one number per text."""


class Layer(NamedTuple):
    """One layer's steps: as they were, and with its queries as they could be guessed earlier."""

    trace: Trace
    guesses: dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=7168, help="tokens per text, at most")
    parser.add_argument("--steps", type=int, default=128, help="consecutive decode steps")
    parser.add_argument("--stride", type=int, default=8, help="mass and error at every n-th step")
    parser.add_argument("--page-tokens", type=numbers, default=(16, 32, 64))
    parser.add_argument("--budgets", type=numbers, default=(256, 512, 1024, 2048))
    parser.add_argument("--texts", default="prose,manual,code")
    parser.add_argument("--dense-layers", type=int, default=1, help="first layers, not averaged")
    parser.add_argument("--plot", metavar="FILE", help="write a picture (needs matplotlib)")
    parser.add_argument("--trace", metavar="FILE", help="write misses per step, layer and KV head")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    model, tokenizer = load_model(arguments.model, device="cpu", dtype="float32")
    values: Values = defaultdict(lambda: defaultdict(list))
    misses: dict[str, list[list[list[int]]]] = {}
    lengths = {}
    for name in arguments.texts.split(","):
        ids = tokenizer(text(name), return_tensors="pt").input_ids[:, : arguments.tokens]
        lengths[name] = ids.shape[1]
        layers, worst = capture(model, ids, arguments.steps)
        say(f"{name}: {ids.shape[1]} tokens; captured queries reproduce the model's attention "
            f"to {worst:.1g}")  # fmt: skip
        for index, layer in enumerate(layers):
            for key, value in measure(layer, arguments, misses.setdefault(name, [])):
                values[key][index].append(value)
            say(f"{name}: layer {index} done, {time.perf_counter() - started:.0f} s")
    report = summary(values, arguments)
    report |= {"texts": lengths, "torch": torch.__version__, "model": arguments.model}
    print_tables(report, arguments)
    if arguments.trace:
        page, budget = shown_regime(arguments)
        replay = {"page_tokens": page, "budget_tokens": budget, "cache_tokens": 2 * budget,
                  "axes": ["layer", "step", "kv_head"], "misses": misses}  # fmt: skip
        Path(arguments.trace).write_text(json.dumps(replay) + "\n")
    if arguments.plot:
        draw(report, arguments)
    print(json.dumps(report))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def numbers(given: str) -> tuple[int, ...]:
    return tuple(int(part) for part in given.split(","))


def text(name: str) -> str:
    """Return text that is at hand without a network."""
    if name == "prose":
        licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
        story = importlib.resources.files("tierkv").joinpath("data/lighthouse.txt").read_text()
        return (licence.read_text()[:6000] if licence.exists() else "") + story
    if name == "manual":
        topics = pydoc_data.topics.topics
        return "\n\n".join(topics[topic] for topic in sorted(topics) if len(topics[topic]) > 5000)
    return inspect.getsource(argparse) if name == "code" else Path(name).read_text()


def capture(model: Any, ids: torch.Tensor, steps: int) -> tuple[list[Layer], float]:
    """Run the model once; return its layers and how far the trace is from its attention.

    Works for models whose layers have ``input_layernorm`` and ``self_attn.q_proj`` (with or
    without ``q_norm``) and one rotary embedding for all: llama, qwen2, qwen3, mistral.
    """
    blocks, tokens = model.model.layers, ids.shape[1]
    past = DynamicCache(config=model.config)
    with watched(blocks, steps + 1) as (residuals, outputs):
        model(input_ids=ids, past_key_values=past, logits_to_keep=1)
    positions = torch.arange(tokens - steps - 1, tokens).unsqueeze(0)
    cos, sin = model.model.rotary_emb(residuals[0], positions)
    layers, worst = [], 0.0
    for index, block in enumerate(blocks):
        queries = project(block, residuals[index], cos, sin)
        guesses = {"exact query": queries[1:], "previous token": queries[:-1]}
        for ahead in (1, 2):
            if index >= ahead:
                guess = project(block, residuals[index - ahead], cos, sin)
                guesses[f"{ahead} layer{'s' * (ahead > 1)} ahead"] = guess[1:]
        trace = Trace(
            queries=queries[1:],
            seen=torch.arange(tokens - steps + 1, tokens + 1),
            keys=past.layers[index].keys[0],
            values=past.layers[index].values[0],
            scale=block.self_attn.scaling,
        )
        layers.append(Layer(trace, guesses))
        out = torch.einsum("skgt,ktd->skgd", attention(trace), trace.values).flatten(1)
        worst = max(worst, float((out - outputs[index][0, 1:]).norm() / out.norm()))
    assert worst < 1e-3, f"captured tensors are not what the model attends with: {worst}"
    return layers, worst


@contextmanager
def watched(blocks: Any, last: int) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Collect what enters each layer and each output projection, for the last tokens."""
    residuals: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []

    def collect(into: list[torch.Tensor]) -> Callable[..., None]:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            into.append(hidden[:, -last:].clone())

        return hook

    handles = []
    for block in blocks:
        for module, into in ((block, residuals), (block.self_attn.o_proj, outputs)):
            handles.append(module.register_forward_pre_hook(collect(into), with_kwargs=True))
    try:
        yield residuals, outputs
    finally:
        for handle in handles:
            handle.remove()


def project(
    block: Any, residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Return the queries ``[steps, heads, k_dim]`` that a layer would make of a residual."""
    attn = block.self_attn
    queries = attn.q_proj(block.input_layernorm(residual)).unflatten(-1, (-1, attn.head_dim))[0]
    if hasattr(attn, "q_norm"):
        queries = attn.q_norm(queries)
    first, second = queries.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return queries * cos[0].unsqueeze(1) + turned * sin[0].unsqueeze(1)


def measure(
    layer: Layer, arguments: Any, misses: list[list[list[int]]]
) -> Iterator[tuple[Key, float]]:
    """Yield (what, value) for everything that is measured on one layer."""
    some = slice(None, None, arguments.stride)
    trace = layer.trace.only(some)
    weights = attention(trace)

    def judge(key: Key, pages: torch.Tensor, regime: Regime) -> Iterator[tuple[Key, float]]:
        result = recovered(trace, weights, pages, regime)
        yield ("mass", *key), float(result.mass.mean())
        yield ("error", *key), float(result.error.mean())

    for page in arguments.page_tokens:
        regime = Regime(page, 0)
        nothing = estimate(selector("window"), trace, regime) > 0
        yield from judge(("window", page, 0), nothing, regime)
        for name in SELECTORS:
            for compete in (False, True) if name in (DEFAULT, "oracle") else (False,):
                mass = estimate(selector(name, page), trace, replace(regime, all_compete=compete))
                for budget in arguments.budgets:
                    own = replace(regime, budget_tokens=budget)
                    if name == "window":
                        own = replace(own, recent_tokens=own.recent_tokens + budget)
                    label = f"{name}, all compete" if compete else name
                    yield from judge((label, page, budget), select(mass, trace, own), own)
        yield from locality(layer.trace, regime, arguments, misses)
    regime = Regime(PREDICT_PAGE, 0)
    mass = estimate(selector(DEFAULT), trace, regime)
    for target in TARGETS:
        own = replace(regime, budget_tokens=max(arguments.budgets), mass_target=target)
        pages = select(mass, trace, own)
        yield from judge(("target", target), pages, own)
        yield ("pages", "target", target), float(pages.sum(dim=-1).float().mean())
    for name, queries in layer.guesses.items():
        guessed = replace(trace, queries=queries[some])
        guess = estimate(selector(DEFAULT), guessed, regime)
        cosine = torch.cosine_similarity(guessed.queries, trace.queries, dim=-1)
        yield ("cosine", "guess", name), float(cosine.mean())
        for budget in arguments.budgets:
            own = replace(regime, budget_tokens=budget)
            pages = select(guess, trace, own)
            shared = overlap(pages, select(mass, trace, own))
            yield ("overlap", "guess", name, budget), float(shared.mean())
            yield from judge(("guess", name, budget), pages, own)


def locality(
    trace: Trace, regime: Regime, arguments: Any, misses: list[list[list[int]]]
) -> Iterator[tuple[Key, float]]:
    """Yield miss rates over consecutive steps; the first step, which fills, is not counted."""
    mass, traced = estimate(selector(DEFAULT), trace, regime), shown_regime(arguments)
    for budget in arguments.budgets:
        own = replace(regime, budget_tokens=budget)
        pages = select(mass, trace, own)
        lookups = int(pages[1:].sum())
        for times in (1, 2, 4):
            missed = reuse_misses(pages, times * own.budget_pages)[1:]
            key = (regime.page_tokens, budget, times)
            yield ("miss", *key), int(missed.sum()) / lookups
            late = missed[len(missed) // 2 :]
            yield ("late miss", *key), int(late.sum()) / int(pages[-len(late) :].sum())
            yield ("worst step", *key), float(missed.sum(dim=1).max() / pages[-1].sum())
            if times == 2 and (regime.page_tokens, budget) == traced:
                misses.append(missed.tolist())


def summary(values: Values, arguments: Any) -> dict[str, Any]:
    """Return rows: each with its mean over texts and layers, and per layer over texts."""
    rows = []
    for key, layers in values.items():
        first = max(arguments.dense_layers, FIRST_GUESSED if key[1] == "guess" else 0)
        shown = [texts for layer, texts in layers.items() if layer >= first]
        per_layer = {layer: round(statistics.fmean(texts), 4) for layer, texts in layers.items()}
        rows.append({
            "what": key[0], "key": list(key[1:]),
            "mean": round(statistics.fmean(map(statistics.fmean, shown)), 4),
            "per_text": [round(statistics.fmean(text), 4) for text in zip(*shown, strict=True)],
            "per_layer": [per_layer.get(layer) for layer in range(max(layers) + 1)],
        })  # fmt: skip
    trace = [
        {"selector": DEFAULT, "page_tokens": page, "budget_tokens": budget,
         "cache_tokens": 2 * budget, "miss_rate": row["mean"],
         "miss_rate_per_layer": row["per_layer"]}
        for row in rows if row["what"] == "miss"
        for page, budget, times in [row["key"]] if times == 2
    ]  # fmt: skip
    regime = Regime(PREDICT_PAGE, 0)
    return {
        "regime": {
            "sink_tokens": regime.sink_tokens, "recent_tokens": regime.recent_tokens,
            "steps": arguments.steps, "dense_layers": arguments.dense_layers,
            "dtype": "float32", "reduction": "mean over the group of softmax over pages",
        },
        "locality_trace": trace,
        "rows": rows,
    }  # fmt: skip


def lookup(report: dict[str, Any]) -> Callable[..., float]:
    table = {(row["what"], *row["key"]): row["mean"] for row in report["rows"]}
    return lambda *key: table[key]


def print_tables(report: dict[str, Any], arguments: Any) -> None:
    get, budgets = lookup(report), arguments.budgets
    columns = "".join(f"{f'B{budget}':>14}" for budget in budgets)
    print(f"attention mass / relative output error, mean over texts and layers "
          f"{arguments.dense_layers}..; budget 0: "
          f"{get('mass', 'window', arguments.page_tokens[0], 0):.3f}")  # fmt: skip
    names = [*SELECTORS, f"{DEFAULT}, all compete", "oracle, all compete"]
    for page in arguments.page_tokens:
        print(f"  {f'pages of {page}':<22}{columns}")
        for name in names:
            cells = (
                f"{get('mass', name, page, b):.3f}/{get('error', name, page, b):.3f}"
                for b in budgets
            )
            print(f"    {name:<20}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"guessed queries, {DEFAULT}, pages of {PREDICT_PAGE}, layers {FIRST_GUESSED}..: "
          f"cosine; overlap/mass/error")  # fmt: skip
    print(f"  {'':<17}{'cos':>7}" + "".join(f"{f'B{b}':>20}" for b in budgets))
    for name in ("exact query", "1 layer ahead", "2 layers ahead", "previous token"):
        triples = [
            "/".join(f"{get(what, 'guess', name, b):.3f}" for what in ("overlap", "mass", "error"))
            for b in budgets
        ]
        cosine = get("cosine", "guess", name)
        print(f"  {name:<17}{cosine:>7.3f}" + "".join(f"{cell:>20}" for cell in triples))
    print(f"stop at a share of estimated mass ({DEFAULT}, pages of {PREDICT_PAGE}, "
          f"at most {max(budgets)} tokens): mean pages, true mass, error")  # fmt: skip
    for target in TARGETS:
        key = ("target", target)
        print(f"  {target:<5} {get('pages', *key):6.1f} {get('mass', *key):.3f} "
              f"{get('error', *key):.3f}")  # fmt: skip
    print(f"miss rate of a reuse cache of 1x/2x/4x the budget, {DEFAULT}; "
          f"(second half of the steps); worst step at 2x")  # fmt: skip
    for page in arguments.page_tokens:
        for budget in budgets:
            rates = "/".join(f"{get('miss', page, budget, n):.3f}" for n in (1, 2, 4))
            late = "/".join(f"{get('late miss', page, budget, n):.3f}" for n in (1, 2, 4))
            worst = get("worst step", page, budget, 2)
            print(f"  P{page:<3} B{budget:<5} {rates}  ({late})  {worst:.3f}")
    page, budget = shown_regime(arguments)
    print(f"by layer, pages of {page}, B{budget}: mass and error, {DEFAULT} (oracle); miss at 2x")
    by = {(row["what"], *row["key"]): row["per_layer"] for row in report["rows"]}
    for layer, miss in enumerate(by["miss", page, budget, 2]):
        pairs = (f"{by[what, DEFAULT, page, budget][layer]:.3f} "
                 f"({by[what, 'oracle', page, budget][layer]:.3f})"
                 for what in ("mass", "error"))  # fmt: skip
        print(f"  {layer:>3}  {'  '.join(pairs)}  {miss:.3f}")


def shown_regime(arguments: Any) -> tuple[int, int]:
    """Return the page size and budget that are shown layer by layer."""
    page, budget = PREDICT_PAGE, 1024
    return (
        page if page in arguments.page_tokens else arguments.page_tokens[0],
        budget if budget in arguments.budgets else arguments.budgets[-1],
    )


def draw(report: dict[str, Any], arguments: Any) -> None:
    """Write error against budget, mass by layer, and miss rate by layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, PercentFormatter

    get, budgets = lookup(report), arguments.budgets
    layers = {(row["what"], *row["key"]): row["per_layer"] for row in report["rows"]}
    page, budget = shown_regime(arguments)
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    figure.suptitle(f"{arguments.model}, {max(report['texts'].values())} tokens, pages of {page}")
    error, mass, miss = figure.subplots(1, 3)
    for name in SELECTORS:
        error.plot(budgets, [get("error", name, page, b) for b in budgets], "o-", label=name)
        mass.plot(layers["mass", name, page, budget], label=name)
    for times in (1, 2, 4):
        miss.plot(layers["miss", page, budget, times], label=f"{times}x budget")
    error.set(xscale="log", yscale="log", xlabel="budget, tokens", title="relative output error")
    error.xaxis.set_minor_formatter(NullFormatter())
    error.set_xticks(budgets, [str(b) for b in budgets])
    for axis in (error.yaxis, miss.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    error.yaxis.set_minor_formatter(NullFormatter())
    error.set_yticks([0.01, 0.02, 0.05, 0.1, 0.2, 0.3])
    mass.set(xlabel="layer", title=f"attention mass recovered at {budget}", ylim=(None, 1))
    miss.set(xlabel="layer", title=f"selected pages not in the reuse cache, {budget}", ylim=0)
    for axes in (error, mass, miss):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(arguments.plot, dpi=130)


if __name__ == "__main__":
    main()
