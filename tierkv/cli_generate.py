"""``tierkv generate``: load, prefill, stream, report."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import torch

from tierkv import api
from tierkv.cli import INTERRUPTED
from tierkv.cli_report import PrefillBar, loading_note, peak_memory, print_report
from tierkv.config import GenerateConfig, Settings
from tierkv.errors import ConfigError
from tierkv.hf import loading
from tierkv.hf.context import Context


class StoppedError(Exception):
    """Ctrl-C came during prefill; raised between two chunks."""


@dataclass
class Run:
    """What one generation did; filled in as it goes, so that a stopped run can still be told.

    Times are `time.perf_counter` seconds. `stats` is the last snapshot of `TieredModel.stats`.
    """

    prompt_tokens: int
    resumed_tokens: int = 0
    start: float = 0.0
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = "length"
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_seconds(self) -> float | None:
        """Time to the first token, prefill included."""
        return self.token_times[0] - self.start if self.token_times else None

    @property
    def ms_per_token(self) -> float | None:
        """Mean time between tokens after the first, in milliseconds."""
        steps = len(self.token_times) - 1
        return 1e3 * (self.token_times[-1] - self.token_times[0]) / steps if steps > 0 else None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens prefilled per second of prefill."""
        prefill = self.stats.get("prefill", {})
        return prefill["tokens"] / prefill["seconds"] if prefill.get("seconds") else None


class TokenStream:
    """A transformers streamer: notes each token's time, and writes text as soon as it is whole.

    Text whose last character is still incomplete (a character may span tokens) is held back.
    """

    def __init__(self, tokenizer: Any, run: Run, out: TextIO | None):
        self._tokenizer, self._run, self._out = tokenizer, run, out
        self._prompt_seen = False
        self._from, self._done = 0, 0  # tokens from _from are decoded; up to _done are written

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt (first call), then ``[n]`` new tokens of the only sequence."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        run, now = self._run, time.perf_counter()
        for token in tokens.reshape(-1).tolist():
            run.token_ids.append(token)
            run.token_times.append(now)
        self._write(final=False)

    def end(self) -> None:
        """Write what was held back."""
        self._write(final=True)

    def _write(self, *, final: bool) -> None:
        ids = self._run.token_ids
        before, now = self._decode(ids[self._from : self._done]), self._decode(ids[self._from :])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return
        piece = now[len(before) :]
        self._from, self._done = self._done, len(ids)
        self._run.text += piece
        if self._out is not None:
            self._out.write(piece)
            self._out.flush()

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class StopFlag:
    """Set by the first Ctrl-C. As a stopping criterion it ends generation at the next token."""

    def __init__(self) -> None:
        self.stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return ``[batch]`` of whether to stop."""
        return torch.full((input_ids.shape[0],), self.stopped, device=input_ids.device)

    def check(self) -> None:
        """Raise `StoppedError` if Ctrl-C was pressed."""
        if self.stopped:
            raise StoppedError

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Take over SIGINT inside the block: the first sets the flag, the second interrupts."""

        def first(_signal: int, _frame: FrameType | None) -> None:
            self.stopped = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            print("\nstopping (Ctrl-C again to abort)", file=sys.stderr, flush=True)

        former = signal.signal(signal.SIGINT, first)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)


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
    _warn_if_long(hf_model, run.prompt_tokens + run_config.max_new_tokens)
    out = None if as_json else sys.stdout
    with api.wrap(hf_model, **asdict(settings.tiers)) as model:
        run.start = time.perf_counter()
        context = _context(model, save, resume)
        if resume is not None:
            run.resumed_tokens = context.rewind(input_ids)
        tier_cache = context.cache if context is not None else model.cache()
        ids = _generate(model, tokenizer, input_ids, tier_cache, run_config, run, out)
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


def _generate(
    model: Any,
    tokenizer: Any,
    input_ids: torch.Tensor,
    tier_cache: Any,
    config: GenerateConfig,
    run: Run,
    out: TextIO | None,
) -> torch.Tensor:
    """Generate into `run`, writing text to `out`. Ctrl-C ends it early but in order.

    Returns all tokens, ``[1, n]``; the cache holds all of them, or all but the last.
    """
    flag, stream = StopFlag(), TokenStream(tokenizer, run, out)
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None}
    if config.temperature > 0:
        torch.manual_seed(config.seed)
        sampling = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    bar = PrefillBar()

    def on_prefill(done: int, total: int) -> None:
        run.stats = model.stats()
        bar.update(done, total, run.stats)
        flag.check()

    ids = input_ids
    with bar, flag.armed():
        try:
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=stream,
                stopping_criteria=[flag],
                on_prefill=on_prefill,
                max_new_tokens=config.max_new_tokens,
                top_k=0 if config.temperature > 0 else None,
                pad_token_id=pad,
                **{model.cache_argument(): tier_cache},
                **sampling,
            )
            ids = output
        except StoppedError:
            stream.end()
        else:
            run.stats = model.stats()
        if flag.stopped:
            run.finish = "interrupted"
        elif len(run.token_ids) < config.max_new_tokens:
            run.finish = "stop"
    if out is not None and run.text and not run.text.endswith("\n"):
        out.write("\n")
        out.flush()
    return ids[:, : max(tier_cache.get_seq_length(), 1) + 1]


def _warn_if_long(hf_model: Any, tokens: int) -> None:
    limit = getattr(hf_model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        print(
            f"tierkv: warning: up to {tokens} tokens, but the model was made for {limit}; "
            f"expect poor text beyond that",
            file=sys.stderr,
        )


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
