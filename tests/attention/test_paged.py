"""Decoding through our kernels, emulated on the CPU, gives the tokens of `DynamicCache`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierkv
from tests.hf.test_exact_tokens import ROWS, model, options, prompt
from tests.kernels import emulator
from tests.paging_helpers import budgets
from tierkv.attention import paged
from tierkv.kernels import decode, merge


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Send every lookup the kernels can take through the emulated ones; count the launches."""
    if emulator.COMPILER is None or not sys.platform.startswith("linux"):
        pytest.skip("the emulator needs g++ on Linux")
    for module in (decode, merge):
        monkeypatch.setattr(module, "kernel", emulator.kernel)
    monkeypatch.setattr(decode, "shared_memory", emulator.shared_memory)

    def fits(query: torch.Tensor, lookup: Any, *, latents: bool, **_: Any) -> bool:
        return query.shape[2] == 1 and lookup.new_tokens == 1 and not latents

    made: list[int] = []
    attend = decode.attend

    def counted(*args: Any, **kwargs: Any) -> int:
        made.append(1)
        return attend(*args, **kwargs)

    monkeypatch.setattr(paged, "fits", fits)
    monkeypatch.setattr(decode, "attend", counted)
    yield made
    assert made, "no lookup went through the kernels"


NEW_TOKENS = 3

CASES = [
    ("llama", "beams", "warm"), ("gemma2", "left-padded", "hot"), ("gpt_oss", "samples", "cold"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mode", "kind"), CASES, ids=str)
def test_generate(name: str, mode: str, kind: str, tmp_path: Path) -> None:
    ids, mask = prompt(mode)
    settings = budgets(kind, model(name), tmp_path, page_tokens=16, rows=ROWS[mode])
    short = {**options(mode), "max_new_tokens": NEW_TOKENS}
    with tierkv.wrap(model(name), prefill_chunk=50, **settings) as wrapped:
        torch.manual_seed(0)
        result = wrapped.generate(ids, attention_mask=mask, **short)
    torch.manual_seed(0)
    want = model(name).generate(ids, attention_mask=mask, **short)
    assert result.sequences.tolist() == want.sequences.tolist()


def test_many_parts_are_compacted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """More parts than slots: they are merged on the way."""
    monkeypatch.setattr(paged, "SLOTS", 4)
    monkeypatch.setattr(paged, "MAX_SPLITS", 2)
    compact, calls = paged._compact, []
    monkeypatch.setattr(paged, "_compact", lambda *args: calls.append(1) or compact(*args))
    test_generate("llama", "single", "minimum", tmp_path)
    assert calls


def test_holes_in_the_mask_stay_with_torch(
    monkeypatch: pytest.MonkeyPatch, launches: list[int]
) -> None:
    """The kernels know padding on the left only; any other mask is applied token by token."""
    ids, _ = prompt("single")
    mask = torch.ones_like(ids)
    mask[0, 40:60] = 0
    with torch.no_grad(), tierkv.wrap(model("llama"), page_tokens=16) as wrapped:
        tier_cache = wrapped.cache()
        call = functools.partial(model("llama"), past_key_values=tier_cache)
        call(ids, attention_mask=mask)
        call(ids[:, :1], attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1))
        assert not launches
        call(ids[:, :1])
        assert launches
