"""Every reason for which a page of a prompt is not found, told apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.combinations import examples
from tests.paging.store_helpers import LAYERS, PAGE_TOKENS, ROOT_KEY, kept, save, tokens
from tests.tiers.cold_helpers import open_store, put
from tierkv.paging import manifest
from tierkv.paging.explain import Prompt, common, explain
from tierkv.paging.keys import Tokens
from tierkv.tiers.cold import ColdStore


@pytest.fixture
def cold(tmp_path: Path) -> Iterator[ColdStore]:
    """A store with "book": tokens 0 to 69, so the fifth page is partial."""
    with open_store(tmp_path) as store:
        save(store, "book", tokens(70))
        yield store


def prompt(ids: Tokens, **changes: object) -> Prompt:
    plain = Prompt(ids, None, bytes.fromhex(ROOT_KEY), "TestModel", "float32", PAGE_TOKENS, LAYERS)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_all_hits(cold: ColdStore) -> None:
    found = explain(cold, prompt(tokens(70)))
    assert (found.hit_pages, found.total_pages, found.reason) == (5, 5, "")
    assert (found.resume, found.resume_tokens) == ("book", 69)  # the last is always computed


def test_first_differing_token(cold: ColdStore) -> None:
    save(cold, "worse", tokens(70, changed=20))
    found = explain(cold, prompt(tokens(64, changed=37)))
    assert (found.hit_pages, found.total_pages) == (2, 4)
    assert found.reason == "differs from 'book' at token 37"
    assert found.difference is not None
    assert (found.difference.name, found.difference.token) == ("book", 37)
    assert (found.resume, found.resume_tokens) == ("book", 37)


@pytest.mark.parametrize(
    ("length", "reason"),
    [
        (100, "'book' ends inside this page, at token 70"),
        (60, "the prompt ends inside this page of 'book'"),
    ],
)
def test_partial_pages(cold: ColdStore, length: int, reason: str) -> None:
    assert explain(cold, prompt(tokens(length))).reason == reason


def test_ends_at_a_page(cold: ColdStore) -> None:
    save(cold, "even", tokens(64, changed=0))
    found = explain(cold, prompt(tokens(100, changed=0)))
    assert found.reason == "no saved context goes on after token 64"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "Other"}, "by another model (TestModel, not Other)"),
        ({"dtype": "bfloat16"}, "in another dtype (float32, not bfloat16)"),
        ({"page_tokens": 32}, "with other pages (16 tokens, not 32)"),
        ({}, "by another TestModel: its weights or configuration differ"),
    ],
)
def test_what_others_saved_is_no_hit(
    cold: ColdStore, changes: dict[str, object], reason: str
) -> None:
    found = explain(cold, prompt(tokens(70), root=bytes(32), **changes))
    assert found.hit_pages == 0
    assert found.reason == f"saved as 'book' {reason}"
    assert found.resume is None


def test_another_chat_template(cold: ColdStore) -> None:
    wrapped = np.concatenate([[7, 7, 7], tokens(70)])
    found = explain(cold, prompt(wrapped, other_ids=tokens(70)))
    assert found.reason == "saved as 'book' with another chat template, or without one"
    found = explain(cold, prompt(tokens(70), other_ids=wrapped))
    assert found.hit_pages == 5


def test_dropped_pages(cold: ColdStore) -> None:
    key = sorted(kept(tokens(70)).page_keys(tokens(70)))[0]
    cold.drop([key])
    assert explain(cold, prompt(tokens(70))).reason.startswith("1 of 2 layers' pages are gone")


def test_an_empty_store_and_pages_without_a_name(tmp_path: Path) -> None:
    with open_store(tmp_path) as cold:
        assert explain(cold, prompt(tokens(20))).reason == "this model has saved nothing here"
        save(cold, "x", tokens(40))
        keys = sorted(kept(tokens(40)).page_keys(tokens(40)))
        manifest.forget(cold, "x")
        put(cold, *keys)
        found = explain(cold, prompt(tokens(50)))
        assert (found.hit_pages, found.resume) == (2, None)


@settings(deadline=None, derandomize=True, max_examples=examples(100))
@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_prefix(first: list[int], second: list[int]) -> None:
    same = common(np.array(first, dtype=np.int64), np.array(second, dtype=np.int64))
    assert first[:same] == second[:same]
    assert same in (len(first), len(second)) or first[same] != second[same]
