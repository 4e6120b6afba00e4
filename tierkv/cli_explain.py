"""``tierkv store explain``: what a store holds of a prompt, and why no more."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np

from tierkv.cli_generate import encode, read_prompt
from tierkv.cli_report import loading_note
from tierkv.cli_store import opened, store_directory
from tierkv.codecs import CODECS
from tierkv.config import Settings
from tierkv.errors import ConfigError, UnsupportedModelError
from tierkv.hf import loading
from tierkv.hf.attach import attach, detach
from tierkv.hf.fingerprint import fingerprint
from tierkv.hf.geometry import model_geometry, stores_latents
from tierkv.paging.explain import Explanation, Prompt, explain
from tierkv.paging.keys import Tokens, root_key
from tierkv.tiers.cold import ColdStore
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.packed import stored_codec

AROUND = 8
"""Tokens shown before and after the first one that differs."""


def explain_store(args: argparse.Namespace, settings: Settings) -> int:
    """Run ``tierkv store explain`` and return its exit code.

    Raises:
        ConfigError: no model, prompt or store is given.
        UnsupportedModelError: the model keeps nothing in pages.
    """
    run, text = settings.run, read_prompt(args.prompt_file, args.prompt)
    if run.model is None:
        raise ConfigError("no model given: --model DIR, --model smollm2 or TIERKV_MODEL")
    args.store = settings.tiers.store
    store_directory(args)
    loading.quiet()
    with loading_note(run.model):
        hf_model, tokenizer = loading.load_model(run.model, device="cpu", dtype=run.dtype)
    with opened(args) as cold:
        prompt = _prompt(hf_model, tokenizer, text, settings, cold)
        found = explain(cold, prompt)
    report = _report(found, prompt, tokenizer)
    if args.json:
        print(json.dumps(report))
    else:
        _print(report, prompt)
    return 0


def _prompt(
    hf_model: Any, tokenizer: Any, text: str, settings: Settings, cold: ColdStore
) -> Prompt:
    former = attach(hf_model)
    try:
        geometry = model_geometry(
            hf_model.config.get_text_config(decoder=True), hf_model.dtype,
            settings.tiers.page_tokens,
            latents=stores_latents(hf_model),
        )  # fmt: skip
        if geometry is None:
            raise UnsupportedModelError(f"{type(hf_model).__name__} keeps nothing in pages")
        codecs = settings.tiers.codecs
        layout = FrameFormat(geometry, CODECS[codecs.warm])
        codec = stored_codec(layout, codecs.zstd_level, cold, always=codecs.always_zstd)
        root = root_key(fingerprint(hf_model), geometry, settings.tiers.salt, codec=codec)
    finally:
        detach(hf_model, former)

    def ids(chat: bool) -> Tokens:
        return np.asarray(encode(tokenizer, text, chat=chat)[0].numpy(), dtype=np.int64)

    has_template = bool(getattr(tokenizer, "chat_template", None))
    chat = settings.run.chat
    return Prompt(
        ids(chat), ids(not chat) if has_template else None, root, type(hf_model).__name__,
        str(geometry.dtype).removeprefix("torch."), geometry.page_tokens, geometry.layers,
    )  # fmt: skip


def _report(found: Explanation, prompt: Prompt, tokenizer: Any) -> dict[str, Any]:
    pages = []
    for index in range(found.total_pages):
        first = index * prompt.page_tokens
        hit = index < found.hit_pages
        reason = found.reason if index == found.hit_pages else "follows a page that is no hit"
        pages.append({
            "page": index, "first_token": first,
            "last_token": min(first + prompt.page_tokens, len(prompt.ids)) - 1,
            "tier": "cold" if hit else None, "reason": None if hit else reason,
        })  # fmt: skip
    report: dict[str, Any] = {
        "tokens": len(prompt.ids), "pages": pages, "hit_pages": found.hit_pages,
        "resume": found.resume, "resume_tokens": found.resume_tokens, "difference": None,
    }  # fmt: skip
    if found.difference is not None:
        at = found.difference.token
        part = slice(max(0, at - AROUND), at + AROUND)
        report["difference"] = {
            "name": found.difference.name, "token": at,
            "prompt_text": tokenizer.decode(prompt.ids[part]),
            "saved_text": tokenizer.decode(found.difference.saved_ids[part]),
        }  # fmt: skip
    return report


def _print(report: dict[str, Any], prompt: Prompt) -> None:
    hits, rows = report["hit_pages"], report["pages"]
    if hits:
        print(f"pages 0-{hits - 1} (tokens 0-{rows[hits - 1]['last_token']}): hit, cold")
    if hits < len(rows):
        miss = rows[hits]
        print(f"page {hits} (tokens {miss['first_token']}-{miss['last_token']}): {miss['reason']}")
    if report["difference"]:
        print(f"    saved:  {report['difference']['saved_text']!r}")
        print(f"    prompt: {report['difference']['prompt_text']!r}")
    if hits + 1 < len(rows):
        print(f"pages {hits + 1}-{len(rows) - 1} (tokens {rows[hits + 1]['first_token']}-"
              f"{rows[-1]['last_token']}): follow a page that is no hit")  # fmt: skip
    total = report["tokens"]
    if report["resume"] is not None:
        print(f"--resume {report['resume']} takes {report['resume_tokens']:,} of {total:,} tokens")
    else:
        print(f"no saved context begins like this prompt of {total:,} tokens")
