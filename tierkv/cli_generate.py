"""``tierkv generate``: load, generate, report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tierkv import api
from tierkv.cli import INTERRUPTED
from tierkv.cli_report import loading_note, peak_memory, print_report
from tierkv.cli_stream import Run, stream, warn_if_long
from tierkv.config import Settings
from tierkv.errors import ConfigError
from tierkv.hf import loading
from tierkv.hf.context import Context


def read_prompt(file: str | None, text: str | None) -> str:
    """Return the document, the prompt, or the document, a blank line and the prompt.

    Raises:
        ConfigError: there is neither, the file cannot be read, or all of it is empty.
    """
    parts = []
    if file is not None:
        try:
            raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
            parts.append(raw.decode("utf-8").strip())
        except OSError as error:
            raise ConfigError(f"--prompt-file {file}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompt-file {file} is not UTF-8 text: {error}") from None
    if text is not None:
        parts.append(text.strip())
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt:
        raise ConfigError("the prompt is empty: give --prompt-file FILE (or -) or --prompt TEXT")
    return prompt


def encode(tokenizer: Any, prompt: str, *, chat: bool) -> torch.Tensor:
    """Return ``[1, tokens]`` ids, inside the model's chat template if `chat` and it has one."""
    if chat and getattr(tokenizer, "chat_template", None):
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    return ids


def generate(
    settings: Settings,
    prompt_file: str | None,
    prompt: str | None,
    *,
    as_json: bool,
    save: str | None = None,
    resume: str | None = None,
) -> int:
    """Run ``tierkv generate`` and return its exit code.

    Args:
        save: name to keep prompt and answer under.
        resume: saved context to start from.

    Raises:
        TierKVError: a setting, the model, a budget or the store does not allow it.
    """
    run_config = settings.run
    if run_config.model is None:
        raise ConfigError("no model given: --model DIR, --model smollm2 or TIERKV_MODEL")
    text = read_prompt(prompt_file, prompt)
    loading.quiet()
    start = time.perf_counter()
    with loading_note(run_config.model):
        hf_model, tokenizer = loading.load_model(
            run_config.model, device=run_config.device, dtype=run_config.dtype
        )
    load_seconds = time.perf_counter() - start
    input_ids = encode(tokenizer, text, chat=run_config.chat).to(hf_model.device)
    run = Run(prompt_tokens=input_ids.shape[1])
    warn_if_long(hf_model, run.prompt_tokens + run_config.max_new_tokens)
    out = None if as_json else sys.stdout
    with api.wrap(hf_model, **asdict(settings.tiers)) as model:
        run.start = time.perf_counter()
        context = _context(model, save, resume)
        if resume is not None:
            run.resumed_tokens = context.rewind(input_ids)
        tier_cache = context.cache if context is not None else model.cache()
        ids = stream(model, tokenizer, input_ids, tier_cache, run_config, run, out)
        if save is not None:
            context.name, context.ids = save, ids
            context.save()
    memory = peak_memory()
    if as_json:
        print(json.dumps(_as_dict(run, settings, load_seconds, memory)))
    else:
        print_report(run, memory, settings.tiers.store)
    return INTERRUPTED if run.finish == "interrupted" else 0


def _context(model: Any, save: str | None, resume: str | None) -> Any:
    """Return the context to start from, or None if nothing is kept.

    Raises:
        ConfigError: the store does not hold the context to resume; names those it does.
    """
    if resume is None:
        return None if save is None else Context(model, save)
    context = model.open(resume)
    if context.recomputed:
        print(f"tierkv: {resume!r} is computed again: {context.recomputed}", file=sys.stderr)
    if not context.tokens:
        known = ", ".join(model.saved()) or "none"
        raise ConfigError(f"--resume {resume}: no such context in the store; saved: {known}")
    return context


def _as_dict(
    run: Run, settings: Settings, load_seconds: float, memory: dict[str, int | None]
) -> dict[str, Any]:
    return {
        "text": run.text,
        "token_ids": run.token_ids,
        "finish": run.finish,
        "prompt_tokens": run.prompt_tokens,
        "resumed_tokens": run.resumed_tokens,
        "new_tokens": len(run.token_ids),
        "timings": {
            "load_seconds": load_seconds,
            "ttft_seconds": run.ttft_seconds,
            "prefill_tokens_per_second": run.prefill_tokens_per_second,
            "ms_per_token": run.ms_per_token,
        },
        "peak_memory": memory,
        "stats": run.stats,
        "config": {row.name: {"value": row.value, "origin": row.origin} for row in settings.rows()},
    }
