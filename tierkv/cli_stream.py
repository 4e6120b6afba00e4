"""Text as it is generated: streaming, timing, and what Ctrl-C does."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TextIO

import torch

from tierkv.cli_report import PrefillBar
from tierkv.config import GenerateConfig


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


def stream(
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
    flag, streamer = StopFlag(), TokenStream(tokenizer, run, out)
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
                streamer=streamer,
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
            streamer.end()
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


def warn_if_long(hf_model: Any, tokens: int) -> None:
    """Warn on stderr if a model was not made for so many tokens."""
    limit = getattr(hf_model.config, "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        print(
            f"tierkv: warning: up to {tokens} tokens, but the model was made for {limit}; "
            f"expect poor text beyond that",
            file=sys.stderr,
        )
