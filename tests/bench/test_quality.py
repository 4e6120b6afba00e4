"""``tierkv eval`` on tiny random models: what rows say, and that full budgets change nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import tierkv
from tests.models import VOCAB, tiny_model
from tierkv.attention import selective
from tierkv.bench import layers, needles, quality
from tierkv.bench.forced import Forced, Setting, forced
from tierkv.cli import main
from tierkv.codecs import CODECS
from tierkv.config import SELECTORS, Config
from tierkv.errors import ConfigError
from tierkv.hf.attach import cache_argument
from tierkv.selection.quality import attention

TIERS: dict[str, Any] = {
    "page_tokens": 16, "sink_tokens": 16, "recent_tokens": 16, "dense_layers": 1,
    "gpu_budget": "64MiB", "cpu_budget": "64MiB", "prefill_chunk": 100,
}  # fmt: skip
SMALL = ("--page-tokens", "16", "--sink-tokens", "16", "--recent-tokens", "16",
         "--dense-layers", "1", "--device", "cpu")  # fmt: skip
FIELDS = {
    "attention", "selector", "token_budget", "perplexity", "perplexity_ratio", "top1_agreement",
    "kl", "tokens_read", "kv_share", "steps", "seconds", "codec", "bytes_per_token",
}  # fmt: skip

Eval = Callable[..., tuple[int, str, str]]


def quiet(text: str, done: int, total: int) -> None:
    """Show no progress."""


def ids_of(tokens: int) -> torch.Tensor:
    torch.manual_seed(tokens)
    return torch.randint(3, VOCAB, (1, tokens))


@pytest.fixture
def evaluate(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Eval:
    """Run ``tierkv eval`` on the tiny model; returns (exit code, stdout, stderr)."""

    def run(*flags: str) -> tuple[int, str, str]:
        code = main(["eval", "--model", str(tiny_model_dir), *SMALL, *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_budget_for_everything_changes_nothing(name: str) -> None:
    """With keys and values kept from one prefill (llama), and with a prefill each (gemma2)."""
    ids = ids_of(331)
    settings = [Setting(), *(Setting(selector, 1024) for selector in SELECTORS)]
    found = list(forced(tiny_model(name), ids, 310, settings, TIERS, quiet))
    rows = [quality.row(one, found[0], ids[0, 311:]) for one in found]
    for row in rows:
        assert set(row) == FIELDS
        assert row["kl"] == pytest.approx(0, abs=1e-6)
        assert row["top1_agreement"] == row["kv_share"] == 1
        assert row["perplexity_ratio"] == pytest.approx(1, abs=1e-5)
        assert row["tokens_read"] == sum(range(311, 331)) / 20
        assert row["steps"] == 20
    assert [row["selector"] for row in rows] == [None, *SELECTORS]


def test_exact_logits_are_those_of_one_forward() -> None:
    """Also of what is fed from keys and values that were kept."""
    model, ids = tiny_model("llama"), ids_of(331)
    with torch.no_grad():
        want = model(ids).logits[0, 310:330]
    for found in forced(model, ids, 310, [Setting(), Setting()], TIERS, quiet):
        torch.testing.assert_close(found.logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("selector", ["cuboid", "window"])
def test_a_small_budget_is_that_of_a_prefill_of_its_own(
    selector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that were kept give the logits of a usual prefill, and reads are counted."""
    model, ids, setting = tiny_model("llama"), ids_of(331), Setting(selector, 48)
    pages: list[int] = []
    look_up = selective.look_up

    def counted(*arguments: Any) -> torch.Tensor:
        chosen = look_up(*arguments)
        pages.append(int((chosen[0, 0] >= 0).sum()))
        return chosen

    _, found = forced(model, ids, 310, [Setting(), setting], TIERS, quiet)
    monkeypatch.setattr(selective, "look_up", counted)
    with torch.no_grad(), tierkv.wrap(model, **TIERS, **setting.arguments(331)) as wrapped:
        cache = wrapped.cache()
        wrapped.prefill(ids[:, :310], cache)
        want = [
            model(ids[:, at : at + 1], **{cache_argument(model): cache}).logits[0, -1]
            for at in range(310, 330)
        ]
    torch.testing.assert_close(found.logits, torch.stack(want), rtol=1e-4, atol=1e-4)
    assert len(pages) == 2 * 20, "two of three layers select"
    tails = [at % 16 + 1 for at in range(310, 330) for _ in range(2)]
    counts = [16 * count + tail for count, tail in zip(pages, tails, strict=True)]
    assert found.tokens_read == pytest.approx(sum(counts) / len(counts))
    whole = sum(range(311, 331)) / 20
    assert found.kv_share == pytest.approx((whole + 2 * found.tokens_read) / (3 * whole))
    exact = Forced(Setting(), torch.randn(20, VOCAB), 0, 1, 0)
    assert quality.row(found, exact, ids[0, 311:])["kl"] > 0


def test_numbers_of_a_row() -> None:
    """Two tokens, distributions known."""
    want = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
    got = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log()
    exact, found = (Forced(Setting(), logits, 1, 1, 0) for logits in (want, got))
    row = quality.row(found, exact, torch.tensor([0, 0]))
    assert row["perplexity"] == pytest.approx(1 / math.sqrt(0.25 * 0.8))
    assert row["perplexity_ratio"] == pytest.approx(math.sqrt(2))
    assert row["top1_agreement"] == 0.5
    assert row["kl"] == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)


def test_needles_are_made_and_counted(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    text = " ".join(f"Sentence {index} of a long report says little." for index in range(60))
    made = [needles.make(tokenizer, text, 1000, seed) for seed in range(6)]
    assert [needle.depth for needle in made] == [0.1, 0.3, 0.5, 0.7, 0.9, 0.1]
    for needle in made:
        context, answer = (tokenizer.decode(part) for part in (needle.context, needle.answer))
        assert 900 < len(needle.context) <= 1000
        assert context.count("The secret number of") == 1
        assert f" is {answer}." in context
        assert len(answer) == needles.DIGITS
        assert tokenizer.decode(needle.question).endswith(" is ")
        place = context.index(" The secret number") / len(context)
        assert abs(place - needle.depth) < 0.1
    assert len({tuple(needle.context[-40:]) for needle in made}) > 1, "slices differ"
    logits = torch.zeros(9, 300)
    answer = [7, 8, 9, 10]
    for step, token in enumerate([7, 1, 9, 2]):
        logits[5 + step, token] = 1.0
    assert needles.right(logits, answer) == 2
    row: dict[str, Any] = {"needles": 0, "answer_tokens": 0, "right": 0, "whole": 0, "by_depth": {}}
    for count in (2, 5):
        needles.add(row, needles.Needle([], [], [1] * 5, 0.5), count)
    assert row == {"needles": 2, "answer_tokens": 10, "right": 7, "whole": 1, "score": 0.7,
                   "by_depth": {"0.5": [7, 10]}}  # fmt: skip


def test_report(evaluate: Eval, tmp_path: Path) -> None:
    file = tmp_path / "out" / "report.json"
    flags = ["--tokens", "512", "--continuation", "8", "--needles", "2", "--budgets", "32,1K",
             "--selectors", "cuboid,window", "--json", str(file), "--commit", "abc"]  # fmt: skip
    code, out, err = evaluate(*flags)
    assert code == 0, err
    report = json.loads(out.splitlines()[-1])
    for part in ("continuation", "needles"):
        assert [(row["selector"], row["token_budget"]) for row in report[part]] == [
            (None, None), ("cuboid", 32), ("cuboid", 1024), ("window", 32), ("window", 1024)
        ]  # fmt: skip
    assert all(set(row) == FIELDS for row in report["continuation"])
    assert {row["needles"] for row in report["needles"]} == {2}
    assert report["needles"][1]["kv_share"] < 0.8
    assert (report["tokens"], report["text"], report["dtype"]) == (512, "bundled", "float32")
    assert json.loads(file.read_text())["needles"] == report["needles"]
    assert [(row["selector"], row["token_budget"]) for row in report["layers"]] == [
        (name, budget) for name in ("oracle", "cuboid", "window") for budget in (32, 1024)
    ]
    for text in ("continuation of 8 tokens", "2 needles", "depth 0.1", "top-1 agreement",
                 "attention recovered"):  # fmt: skip
        assert text in out


def test_layers_are_those_of_the_model() -> None:
    """Attention over a trace gives what the model's own attention puts out."""
    model, ids, outputs = tiny_model("llama"), ids_of(331), list[torch.Tensor]()
    found = layers.traces(model, ids, TIERS, quiet)
    hooks = [
        block.self_attn.o_proj.register_forward_pre_hook(
            lambda _, given: outputs.append(given[0][0, -layers.STEPS :])
        )
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    for trace, want in zip(found, outputs, strict=True):
        got = torch.einsum("skgt,ktd->skgd", attention(trace), trace.values).flatten(1)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_what_layers_recover_and_move() -> None:
    found = layers.traces(tiny_model("llama"), ids_of(331), TIERS, quiet)
    config = Config.from_kwargs(**TIERS)
    selectors, budgets = ("oracle", "cuboid", "window"), (32, 512)
    rows = layers.measure(found, selectors, budgets, config, quiet)
    table = {(row["selector"], row["token_budget"]): row for row in rows}
    assert list(table) == [(name, budget) for name in selectors for budget in budgets]
    for (name, budget), row in table.items():
        assert row["selecting_layers"] == 2
        assert len(row["mass"]) == len(row["error"]) == len(row["moved"]) == 3
        if budget == 512:
            assert row["mass_mean"] == pytest.approx(1)
            assert row["error_mean"] == pytest.approx(0, abs=1e-5)
        else:
            assert 0.1 < row["mass_mean"] < 0.9
            assert row["moved_bytes"] == (0 if name == "window" else sum(row["moved"][1:]))
    masses = [table[name, 32]["mass_mean"] for name in selectors]
    assert masses == sorted(masses, reverse=True)
    page = 2 * 16 * 16 * 4
    assert 0 < table["cuboid", 32]["moved_bytes"] < 2 * 2 * 2 * page, "two pages in two heads"
    small = layers.measure(found, ("cuboid",), (32,), replace(config, reuse=1.0), quiet)
    assert small[0]["moved_bytes"] > table["cuboid", 32]["moved_bytes"], "a smaller reuse cache"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gpt_oss", "soft cap or sink"), ("gemma2", "soft cap or sink"),
     ("mistral-sliding", "no layer has full attention")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:MistralForCausalLM has no full-attention layer")
def test_layers_that_are_not_modelled_say_so(name: str, reason: str) -> None:
    with pytest.raises(layers.NotModelledError, match=reason):
        layers.traces(tiny_model(name), ids_of(100), TIERS, quiet)


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the picture")
    from tierkv.bench.quality_plot import draw

    exact = Forced(Setting(), torch.randn(4, 9), 64, 1, 0)
    rows = [quality.row(exact, exact, torch.arange(4))]
    rows += [rows[0] | Setting("cuboid", budget).row() for budget in (64, 128)]
    report = {"continuation": rows, "needles": [], "layers": [], "tokens": 64}
    draw(report, tmp_path / "p" / "quality.png")
    size = (tmp_path / "p" / "quality.png").stat().st_size
    report["layers"] = [
        Setting("cuboid", budget).row()
        | {
            "mass": [1, 0.9],
            "error": [0, 0.1],
            "mass_mean": 0.9,
            "error_mean": 0.1,
            "moved_bytes": 9,
        }
        for budget in (64, 128)
    ]
    draw(report, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > size > 1000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "12Q"], "--tokens: tokens must be numbers"),
        (["--tokens", "1M"], "exceed the model's 131072 tokens"),
        (["--tokens", "16"], "--tokens must be at least 32 (two pages), got 16"),
        (["--tokens", "100K"], "--text has"),
        (["--tokens", "100K", "--continuation", "0"], "--tokens 102400: needles"),
        (["--budgets", "many"], "--budgets: tokens must be numbers"),
        (["--budgets", "8"], "--budgets must be at least a page (16 tokens), got 8"),
        (["--selectors", "cuboid,quest"], "--selectors must be among cuboid"),
        (["--text", "nowhere.txt"], "--text nowhere.txt cannot be read"),
        (["--continuation", "-1"], "--continuation must not be negative"),
        (["--continuation", "0", "--needles", "0"], "leave nothing to evaluate"),
        (["--page-tokens", "17"], "page_tokens must be a power of two"),
    ],
)
def test_errors_are_one_line_and_code_2(evaluate: Eval, flags: list[str], message: str) -> None:
    code, out, err = evaluate(*flags)
    assert (code, out) == (2, "")
    assert message in err
    assert err.splitlines()[-1].startswith("tierkv: error: ")


def test_a_picture_needs_matplotlib(evaluate: Eval, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = evaluate("--plot", "quality.png")
    assert code == 2
    assert "--plot needs matplotlib" in err


def test_codecs_are_compared_with_raw_pages(evaluate: Eval) -> None:
    """One row each: smaller pages, a small loss, the worst layer; selectors only if asked for."""
    flags = ("--needles", "0", "--tokens", "200", "--continuation", "8", "--codecs", "all")
    code, out, _ = evaluate(*flags)
    report = json.loads(out.splitlines()[-1])
    rows = {row["codec"]: row for row in report["continuation"]}
    assert code == 0 and list(rows) == list(CODECS)
    raw = rows.pop("raw")
    assert raw["perplexity_ratio"] == 1 and set(raw) == FIELDS
    for name, row in rows.items():
        assert row["bytes_per_token"] < 0.8 * raw["bytes_per_token"], name  # dims of 8: padding
        assert 0 < row["kl"] < 1 and 0 < row["k_error"] < 0.2 and 0 < row["v_error"] < 0.2
        assert row["k_error_layer"] in (0, 1)
    assert rows["int8-channel"]["kl"] < rows["int4"]["kl"]
    assert rows["int8-channel"]["v_error"] < 0.2 * rows["int4"]["v_error"]
    for text in ("claimed loss", "worst keys", "int4-importance", "100.0%"):
        assert text in out
    code, out, _ = evaluate(*flags[:-1], "int8", "--selectors", "cuboid", "--budgets", "64")
    names = [
        (row["codec"], row["selector"]) for row in json.loads(out.splitlines()[-1])["continuation"]
    ]
    assert code == 0 and names == [("raw", None), ("int8", None), ("raw", "cuboid")]
    assert evaluate("--codecs", "int3")[0] == 2


def test_codecs_need_every_layer_to_attend_to_everything() -> None:
    """A model with windows recomputes its context for every setting: nothing to encode."""
    with pytest.raises(ConfigError, match="--codecs"):
        list(forced(tiny_model("gemma2"), ids_of(120), 100, [Setting(), Setting(codec="int8")],
                    TIERS, quiet))  # fmt: skip
