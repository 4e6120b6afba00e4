"""`TierCache` against `DynamicCache` under every operation, and its guards.

Each test compares logits: an operation that went wrong shows in what the model says next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import tierkv
from tests.combinations import each, pairs
from tests.models import VOCAB, tiny_model
from tests.paging_helpers import budgets
from tierkv.attention import exact
from tierkv.errors import (
    ClosedError,
    ColdReadError,
    HandshakeError,
    TierKVError,
    UnsupportedModelError,
    WarmBudgetError,
)
from tierkv.hf.attach import cache_argument
from tierkv.hf.cache import TierCache

SETTINGS: dict[str, Any] = {"gpu_budget": "16MiB", "cpu_budget": "16MiB", "page_tokens": 16}
KINDS = ["hot", "warm", "minimum"]


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def forward(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=True, **{cache_argument(model): cache}).logits


def fresh(model: Any, wrapped: Any, ids: torch.Tensor, last: int) -> torch.Tensor:
    """Logits of the last tokens, computed in one go by a new cache."""
    return forward(model, wrapped.cache(), ids)[:, -last:]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=3e-4, rtol=1e-3)


@contextmanager
def failing(module: torch.nn.Module, error: type[BaseException] = RuntimeError) -> Iterator[None]:
    """Make a module raise when it runs."""

    def fail(*args: Any) -> None:
        raise error("out of luck")

    hook = module.register_forward_pre_hook(fail)
    try:
        with pytest.raises(error, match="out of luck"):
            yield
    finally:
        hook.remove()


# -- handshake -----------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 30])
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3", "qwen3_next"])
def test_other_attention_is_an_error_not_wrong_logits(name: str, held: int) -> None:
    """Even with one tiered layer only (gemma2 here), at the very first forward."""
    model, ids = tiny_model(name), tokens(1, 45)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        if held:
            forward(model, cache, ids[:, :held])
        model.set_attn_implementation("eager")
        with pytest.raises(HandshakeError, match="'eager'"):
            forward(model, cache, ids[:, held:])
        model.set_attn_implementation("tierkv")
        if name == "llama":  # nothing was added: it goes on as if nothing had been
            assert cache.get_seq_length() == held
            close(forward(model, cache, ids[:, held:]), fresh(model, wrapped, ids, 45 - held))
        cache.reset()
        close(forward(model, cache, ids), fresh(model, wrapped, ids, 45))


def test_update_that_no_attention_follows_is_an_error() -> None:
    with tierkv.wrap(tiny_model("llama"), **SETTINGS) as wrapped:
        cache, other = wrapped.cache(), wrapped.cache()
        k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
        got_k, got_v = cache.update(k, v, 0)
        assert got_k is k and got_v is v  # only the new tokens
        for _ in range(2):
            with pytest.raises(HandshakeError, match=r"layer 0 .*rollback\(\) or reset\(\)"):
                cache.update(k, v, 1)
        other.update(k, v, 0)  # no concern of another cache
        cache.rollback()
        assert cache.get_seq_length() == 0
        cache.update(k, v, 0)
        assert cache.get_seq_length() == 5


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_handle_left_behind_is_not_taken_for_another_cache(name: str) -> None:
    """A forward that stops between update and attention must not leak into the next one."""
    model, ids = tiny_model(name), tokens(1, 40)
    want = forward(model, DynamicCache(config=model.config), ids)
    geometry = {"llama": ((2, 16), (2, 16)), "deepseek_v3": ((1, 32), (1, 8))}[name]
    k, v = (torch.randn(1, heads, 40, dim) for heads, dim in geometry)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        for make in (lambda: DynamicCache(config=model.config), wrapped.cache):
            abandoned = wrapped.cache()
            forward(model, abandoned, tokens(1, 30, seed=2))
            abandoned.update(k, v, 0)
            close(forward(model, make(), ids), want)


# -- cropping ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remove", "kind"), each([1, 7, 15, 16, 17, 40, 95, 99], ["minimum", "warm", "minimum", "hot"])
)
def test_crop_then_continue_equals_recomputation(remove: int, kind: str, tmp_path: Path) -> None:
    model, ids, other = tiny_model("llama"), tokens(2, 100), tokens(2, 50, seed=2)
    settings = budgets(kind, model, tmp_path, page_tokens=16, rows=4)
    with tierkv.wrap(model, **settings) as wrapped:
        cache, stock = wrapped.cache(), DynamicCache(config=model.config)
        forward(model, cache, ids)
        cache.crop(-remove)
        kept = 100 - remove
        assert cache.get_seq_length() == kept
        got = [forward(model, cache, other[:, a:b]) for a, b in ((0, 1), (1, 33), (33, 50))]
    forward(model, stock, ids[:, :kept])
    close(torch.cat(got, dim=1), forward(model, stock, other))


def test_crop_forms() -> None:
    model, ids = tiny_model("llama"), tokens(1, 50)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids)
        cache.crop(0)
        cache.crop(torch.tensor(0))
        assert cache.get_seq_length() == 50
        removed = torch.tensor(-4)
        cache.crop(removed)
        removed -= 40  # the length must not be an alias of what it was computed from
        assert cache.get_seq_length() == 46
        assert type(cache.get_seq_length()) is int
        cache.crop(40)  # positive: what to keep
        assert cache.get_seq_length() == 40
        cache.crop(45)
        assert cache.get_seq_length() == 40
        close(forward(model, cache, ids[:, 40:]), fresh(model, wrapped, ids, 10))
        cache.crop(-1000)
        assert cache.get_seq_length() == 0
        close(forward(model, cache, ids), fresh(model, wrapped, ids, 50))


def test_crop_to_a_page_border_and_nothing_new() -> None:
    model, ids = tiny_model("llama"), tokens(1, 64)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids)
        for length in (48, 47, 32, 16):
            cache.crop(length - cache.get_seq_length())
            assert cache.get_seq_length() == length
        close(forward(model, cache, ids[:, 16:]), fresh(model, wrapped, ids, 48))


def test_crop_that_a_sliding_window_refuses_changes_nothing() -> None:
    model, ids = tiny_model("gemma2"), tokens(1, 100)  # windows of 40
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids[:, :90])
        with pytest.raises(RuntimeError, match="activate_past_recording"):
            cache.crop(-5)
        assert cache.get_seq_length() == 90
        close(forward(model, cache, ids[:, 90:]), fresh(model, wrapped, ids, 10))


# -- batches -------------------------------------------------------------------------------

Operation = Callable[[Any], None]
OPERATIONS: dict[str, Operation] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
    "reorder to itself": lambda cache: cache.reorder_cache(torch.tensor([0, 1, 2])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 0])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "repeat once": lambda cache: cache.batch_repeat_interleave(1),
}


@pytest.mark.parametrize(("name", "kind", "held"), pairs(["llama", "gemma2"], KINDS, [5, 32, 45]))
def test_batch_operations(name: str, kind: str, held: int, tmp_path: Path) -> None:
    model, ids = tiny_model(name), tokens(3, held)
    settings = budgets(kind, model, tmp_path, page_tokens=16, rows=6)
    with tierkv.wrap(model, **settings) as wrapped:
        for what, operation in OPERATIONS.items():
            cache, stock = wrapped.cache(), DynamicCache(config=model.config)
            for each in (cache, stock):
                forward(model, each, ids)
                operation(each)
            batch = len(stock.layers[0].keys)
            for step, count in enumerate((1, 20, 1)):
                more = tokens(batch, count, seed=step)
                got, want = forward(model, cache, more), forward(model, stock, more)
                assert got.shape == want.shape
                torch.testing.assert_close(got, want, atol=3e-4, rtol=1e-3, msg=what)
            cache.close()


def test_random_operations_equal_dynamic_cache(tmp_path: Path) -> None:
    """A long walk of appends, crops and batch changes, with three tiers in use."""
    model, generator = tiny_model("llama"), torch.Generator().manual_seed(11)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    settings = budgets("minimum", model, tmp_path, page_tokens=16, rows=5)
    with tierkv.wrap(model, **settings) as wrapped:
        cache, stock, batch = wrapped.cache(), DynamicCache(config=model.config), 2
        for step in range(60):
            ids = tokens(batch, pick(1, 30) if pick(0, 2) else 1, seed=step)
            close(forward(model, cache, ids), forward(model, stock, ids))
            action = pick(0, 4)
            length = stock.get_seq_length()
            rows = torch.randint(0, batch, (pick(1, 6),), generator=generator)
            for each in (cache, stock):
                if action == 0:
                    each.crop(-min(1 + step, length - 1))
                elif action == 1:
                    each.batch_select_indices(rows)
                elif action == 2:
                    each.reorder_cache(rows[torch.arange(batch) % len(rows)])
            batch = len(rows) if action == 1 else batch
        cache.close()
        assert wrapped.manager is not None
        assert wrapped.manager.hot.pages == wrapped.manager.warm.pages == 0


def test_another_batch_size_is_an_error() -> None:
    model = tiny_model("llama")
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, tokens(2, 20))
        for batch in (1, 3):
            with pytest.raises(TierKVError, match=f"holds 2 sequences, got a batch of {batch}"):
                forward(model, cache, tokens(batch, 5))
        assert cache.get_seq_length() == 20
        assert [layer.batch_size for layer in cache.layers] == [2, 2, 2]


def test_two_caches_take_turns(tmp_path: Path) -> None:
    model = tiny_model("llama")
    first, second = tokens(1, 80), tokens(2, 80, seed=2)
    settings = budgets("cold", model, tmp_path, page_tokens=16, rows=6)
    with tierkv.wrap(model, **settings) as wrapped:
        a, b = wrapped.cache(), wrapped.cache()
        got_a, got_b = [], []
        for start, stop in ((0, 40), (40, 41), (41, 42), (42, 75), (75, 80)):
            got_a.append(forward(model, a, first[:, start:stop]))
            got_b.append(forward(model, b, second[:, start:stop]))
        close(torch.cat(got_a, dim=1), fresh(model, wrapped, first, 80))
        close(torch.cat(got_b, dim=1), fresh(model, wrapped, second, 80))


# -- failures in the middle ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "where", "error", "kind"),
    pairs(
        [1, 3, 50], ["mlp", "self_attn", "self_attn.o_proj"], [RuntimeError, KeyboardInterrupt],
        KINDS,
    ),
)  # fmt: skip
def test_rollback_after_an_exception(
    new: int, where: str, error: type[BaseException], kind: str, tmp_path: Path
) -> None:
    model, ids = tiny_model("llama"), tokens(2, 37 + new + 5)
    settings = budgets(kind, model, tmp_path, page_tokens=16, rows=4)
    with tierkv.wrap(model, **settings) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids[:, :37])
        with failing(model.model.layers[1].get_submodule(where), error):
            forward(model, cache, ids[:, 37 : 37 + new])
        with pytest.raises(TierKVError, match=r"stopped midway .*rollback\(\) or reset\(\)"):
            forward(model, cache, ids[:, 37 : 37 + new])
        cache.rollback()
        assert cache.get_seq_length() == 37
        forward(model, cache, ids[:, 37 : 37 + new])
        got = forward(model, cache, ids[:, 37 + new :])
        close(got, fresh(model, wrapped, ids, 5))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_rollback_of_short_sliding_windows(layer: int) -> None:
    """gemma2: layers 0 and 2 slide over 40 tokens and belong to transformers."""
    model, ids = tiny_model("gemma2"), tokens(1, 35)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids[:, :20])
        with failing(model.model.layers[layer].self_attn.o_proj):
            forward(model, cache, ids[:, 20:])
        if layer < 2:
            with pytest.raises(TierKVError, match="stopped midway"):
                forward(model, cache, ids[:, 20:23])  # sliding layers take these once more
        cache.rollback()
        if layer == 2:  # every layer has its tokens: such a forward counts as done
            assert cache.get_seq_length() == 35
            cache.crop(-15)
        assert [each.get_seq_length() for each in cache.layers] == [20, 20, 20]
        close(forward(model, cache, ids[:, 20:]), fresh(model, wrapped, ids, 15))


def test_rollback_when_attention_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only tiered layer, and the last one: the lengths of the layers tell nothing."""
    layers = ["sliding_attention", "full_attention"]
    model = tiny_model("gemma3", num_hidden_layers=2, layer_types=layers)
    ids = tokens(1, 35)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ColdReadError("out of luck")

    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids[:, :20])
        with monkeypatch.context() as patch, pytest.raises(ColdReadError):
            patch.setattr(exact, "attend", fail)
            forward(model, cache, ids[:, 20:])
        cache.rollback()
        assert [each.get_seq_length() for each in cache.layers] == [20, 20]
        close(forward(model, cache, ids[:, 20:]), fresh(model, wrapped, ids, 15))


@pytest.mark.parametrize(
    ("name", "what"), [("gemma2", "full sliding windows"), ("qwen3_next", "recurrent layers")]
)
def test_state_that_cannot_be_rolled_back_says_so(name: str, what: str) -> None:
    model, ids = tiny_model(name), tokens(1, 80)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids[:, :60])
        with failing(model.model.layers[1].mlp):
            forward(model, cache, ids[:, 60:])
        with pytest.raises(TierKVError, match=rf"{what} cannot be rolled back; call reset"):
            cache.rollback()
        cache.reset()
        close(forward(model, cache, ids), fresh(model, wrapped, ids, 80))


def test_a_failed_first_forward_does_not_disturb_other_caches() -> None:
    model, ids = tiny_model("llama"), tokens(1, 40)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        good, bad = wrapped.cache(), wrapped.cache()
        forward(model, good, ids[:, :20])
        with failing(model.model.layers[1].self_attn.o_proj):
            forward(model, bad, ids)
        close(forward(model, good, ids[:, 20:]), fresh(model, wrapped, ids, 20))


def test_no_room_leaves_the_cache_whole() -> None:
    model, ids = tiny_model("llama"), tokens(1, 400)
    settings = budgets("warm", model, Path(), page_tokens=16, rows=1)
    with tierkv.wrap(model, **settings | {"cpu_budget": 12 * 4096}) as wrapped:
        cache, held = wrapped.cache(), 0
        with pytest.raises(WarmBudgetError, match="raise cpu_budget"):
            for held in range(0, 400, 20):
                forward(model, cache, ids[:, held : held + 20])
        assert held > 60
        assert cache.get_seq_length() == held
        count = 16 - held % 16 - 1  # what fits the tail still does
        got = forward(model, cache, ids[:, held : held + count]) if count else None
        want_ids = ids[:, : held + count]
    if got is not None:
        stock = forward(model, DynamicCache(config=model.config), want_ids)
        close(got, stock[:, -count:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_names_the_layer(dtype: torch.dtype) -> None:
    with tierkv.wrap(tiny_model("llama"), **SETTINGS) as wrapped:
        k = torch.randn(1, 2, 5, 16, dtype=dtype)
        with pytest.raises(UnsupportedModelError, match=f"layer 0 caches .*{dtype}"):
            wrapped.cache().update(k, k, 0)


# -- life ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next", "deepseek_v3"])
def test_reset_forgets_everything(name: str, how: str) -> None:
    model, ids, other = tiny_model(name), tokens(2, 70), tokens(1, 60, seed=2)
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        forward(model, cache, ids)
        getattr(cache, how)()
        assert cache.get_seq_length() == 0
        assert wrapped.manager is not None
        assert wrapped.manager.hot.pages == 0
        close(forward(model, cache, other), fresh(model, wrapped, other, 60))  # another batch


def test_reset_of_an_empty_cache() -> None:
    with tierkv.wrap(tiny_model("llama"), **SETTINGS) as wrapped:
        cache = wrapped.cache()
        cache.reset()
        cache.rollback()
        cache.crop(-3)
        cache.close()
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("kind", ["hot", "minimum"])
def test_cache_of_a_closed_model(kind: str, tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    settings = budgets(kind, model, tmp_path, page_tokens=16, rows=2)
    with tierkv.wrap(model, **settings) as wrapped:
        cache, unused = wrapped.cache(), wrapped.cache()
        forward(model, cache, ids)
    uses: list[Callable[[], Any]] = [
        lambda: forward(model, cache, ids[:, :1]),
        lambda: forward(model, unused, ids),
        lambda: cache.crop(-5),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.rollback(),
        lambda: wrapped.cache(),
        lambda: wrapped.generate(ids),
        lambda: wrapped.prefill(ids, cache),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="closed"):
            use()
    cache.close()
    cache.reset()
    assert cache.get_seq_length() == 0


def test_dropped_cache_gives_its_pages_back() -> None:
    """Without the garbage collector's help, at the next start of a sequence."""
    model = tiny_model("llama")
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        assert wrapped.manager is not None
        gc.disable()
        try:
            cache = wrapped.cache()
            forward(model, cache, tokens(2, 160))
            held = wrapped.manager.hot.pages
            assert held == 3 * 2 * 11
            del cache
            other = wrapped.cache()
            forward(model, other, tokens(1, 20))
            assert wrapped.manager.hot.pages == 3 * 2
        finally:
            gc.enable()


def test_cache_is_what_transformers_expects() -> None:
    model = tiny_model("gemma3")
    with tierkv.wrap(model, **SETTINGS) as wrapped:
        cache = wrapped.cache()
        assert isinstance(cache, TierCache)
        assert len(cache) == 4
        assert cache.is_sliding == [True, False, True, False]
        assert not cache.is_compileable
        assert not hasattr(cache, "to")  # accelerate would call it
        forward(model, cache, tokens(1, 30))
        assert cache.get_seq_length() == cache.get_seq_length(1) == 30
        assert cache.get_mask_sizes(5, 1) == (35, 0)
        assert cache.layers[1].get_max_length() == -1
