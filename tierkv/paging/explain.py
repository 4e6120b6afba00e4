"""Why each page of a prompt is, or is not, found in a store."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.paging import manifest
from tierkv.paging.keys import KEPT_PREFIX, Tokens, block_keys, page_key
from tierkv.paging.manifest import Manifest
from tierkv.tiers.cold import ColdStore


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is looked for.

    Attributes:
        ids: ``[tokens]`` of the prompt.
        other_ids: ``[tokens]`` of the same text with the chat template left out, or put on; None
            if there is no template.
        root: root key of the model's pages.
        model, dtype: of the model, as manifests have them.
        page_tokens, layers: shape of its pages.
    """

    ids: Tokens
    other_ids: Tokens | None
    root: bytes
    model: str
    dtype: str
    page_tokens: int
    layers: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a prompt and a saved context part: `token` is the first that differs."""

    name: str
    token: int
    saved_ids: Tokens


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a store holds of a prompt.

    Attributes:
        hit_pages: leading page positions of which every layer's page is stored (tier cold).
        total_pages: page positions of the prompt, a partial last one included.
        reason: why the first page that is no hit is none; empty if there is no such page.
        difference: the saved context that agrees longest, if the reason is that they part.
        resume: saved context that `--resume` would take most tokens from, or None.
        resume_tokens: how many.
    """

    hit_pages: int
    total_pages: int
    reason: str
    difference: Difference | None
    resume: str | None
    resume_tokens: int


def explain(cold: ColdStore, prompt: Prompt) -> Explanation:
    """Return what is stored of a prompt and why no more of it is. Nothing is read but keys."""
    keys = block_keys(prompt.root, prompt.ids, prompt.page_tokens)
    stored = set(cold.keys(KEPT_PREFIX))
    hits, lacking = 0, 0
    for key in keys:
        lacking = sum(page_key(key, layer) not in stored for layer in range(prompt.layers))
        if lacking:
            break
        hits += 1
    saved = sorted(
        ((common(prompt.ids, ids), name, kept, ids) for name, kept, ids in manifest.each(cold)),
        key=lambda row: (-row[0], row[1]),
    )
    own = [row for row in saved if row[2].root == prompt.root.hex()]
    reason, difference = "", None
    if hits < len(keys):
        if lacking < prompt.layers:
            reason = f"{lacking} of {prompt.layers} layers' pages are gone: dropped or damaged"
        else:
            reason, difference = _why(prompt, saved, own, hits * prompt.page_tokens)
    best = max(
        ((min(same, kept.held, len(prompt.ids) - 1), name) for same, name, kept, _ in own),
        default=(0, None), key=lambda row: row[0],
    )  # fmt: skip
    resume = best[1] if best[0] > 0 else None
    return Explanation(hits, len(keys), reason, difference, resume, max(0, best[0]))


def common(first: Tokens, second: Tokens) -> int:
    """Return how many leading tokens are the same."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length


Saved = tuple[int, str, Manifest, Tokens]


def _why(
    prompt: Prompt, saved: list[Saved], own: list[Saved], start: int
) -> tuple[str, Difference | None]:
    """Return why the page that begins at token `start` is not stored at all."""
    same, name, kept, ids = own[0] if own else (0, "", None, prompt.ids[:0])
    for other_same, other_name, other, _ in saved:
        if other.root != prompt.root.hex() and other_same > max(start, same):
            return f"saved as {other_name!r} {_stranger(prompt, other)}", None
    if prompt.other_ids is not None:
        for _, other_name, _, other_ids in own:
            if common(prompt.other_ids, other_ids) > max(same, prompt.page_tokens):
                return f"saved as {other_name!r} with another chat template, or without one", None
    if kept is None:
        return "this model has saved nothing here", None
    if same > start and same == len(prompt.ids):
        return f"the prompt ends inside this page of {name!r}", None
    if start < kept.held <= same:
        return f"{name!r} ends inside this page, at token {kept.held:,}", None
    if start <= same < min(kept.held, len(prompt.ids)):
        return f"differs from {name!r} at token {same:,}", Difference(name, same, ids)
    return f"no saved context goes on after token {start:,}", None


def _stranger(prompt: Prompt, other: Manifest) -> str:
    """Return in what the maker of a saved context differs."""
    if other.model != prompt.model:
        return f"by another model ({other.model}, not {prompt.model})"
    if other.dtype and other.dtype != prompt.dtype:
        return f"in another dtype ({other.dtype}, not {prompt.dtype})"
    if other.page_tokens != prompt.page_tokens:
        return f"with other pages ({other.page_tokens} tokens, not {prompt.page_tokens})"
    return f"by another {other.model}: its weights or configuration differ"
