"""``tierkv chat``: many turns on the terminal, each computing only what is new."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from tierkv import api
from tierkv.cli_report import loading_note, print_tiers
from tierkv.cli_stream import Run, stream, warn_if_long
from tierkv.config import Settings
from tierkv.errors import ConfigError, TierKVError
from tierkv.hf import loading
from tierkv.hf.conversation import Conversation
from tierkv.paging.whereabouts import tokens_by_tier

PROMPT = "> "
HELP = """\
/edit TEXT    replace your last message and answer again
/fork NAME    go on in a copy that shares the past; the chat you leave stays open
/switch NAME  go on in another chat, open or saved
/save [NAME]  keep this chat in the store
/list         chats that are open or saved
/stats        tiers and tokens so far
/help         this
/quit         leave (also Ctrl-D); chats with a name are saved
Ctrl-C stops an answer. A message that begins with a slash begins with two."""


def chat(settings: Settings, name: str | None, system: str | None) -> int:
    """Run ``tierkv chat`` and return its exit code.

    It is 2 if a chat could not be saved at the end, or a line of piped input failed.

    Args:
        name: chat to go on with, or to begin and save; None for one that is not kept.
        system: system message of a new chat.

    Raises:
        TierKVError: a setting, the model or the store does not allow it.
    """
    run = settings.run
    if run.model is None:
        raise ConfigError("no model given: --model DIR, --model smollm2 or TIERKV_MODEL")
    loading.quiet()
    with loading_note(run.model):
        hf_model, tokenizer = loading.load_model(run.model, device=run.device, dtype=run.dtype)
    with api.wrap(hf_model, **asdict(settings.tiers)) as model:
        session = Session(model, tokenizer, settings, name, system)
        try:
            session.run()
        finally:
            saved = session.save_all()
    return 2 if not saved or (session.failed and not sys.stdin.isatty()) else 0


class Session:
    """Open chats of one wrapped model, and the one that is being held.

    Attributes:
        now: the current chat.
        failed: whether a line could not be carried out.
    """

    def __init__(
        self, model: Any, tokenizer: Any, settings: Settings, name: str | None, system: str | None
    ):
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._system, self._open = system, list[Conversation]()
        self._turns = 0
        self.failed = False
        self.now = self._opened(name)
        self._commands: dict[str, Callable[[str], None]] = {
            "edit": self._edit, "fork": self._fork, "switch": self._switch, "save": self._save,
            "list": self._list, "stats": self._stats, "help": lambda _: _say(HELP),
        }  # fmt: skip

    def run(self) -> None:
        """Take lines until there are no more, or ``/quit``."""
        for line in _lines():
            if line == "/quit":
                return
            try:
                self._do(line)
            except TierKVError as error:
                self.failed = True
                _say(_one_line(error))

    def save_all(self) -> bool:
        """Save every open chat that has a name and was told anything; return whether all were."""
        done = True
        for one in self._open:
            if one.context.name is not None and one.context.tokens:
                try:
                    self._keep(one)
                except TierKVError as error:
                    done = False
                    _say(f"{_one_line(error)} ({one.context.name!r} is not saved)")
        return done

    def _do(self, line: str) -> None:
        if not line.startswith("/") or line.startswith("//"):
            text = line[1:] if line.startswith("/") else line
            self._turn(lambda: self.now.ask(text))
            return
        word, _, argument = line[1:].partition(" ")
        if word not in self._commands:
            raise ConfigError(f"no command /{word}; /help lists them")
        self._commands[word](argument.strip())

    def _turn(self, prepare: Callable[[], Any]) -> None:
        """Answer the prompt that `prepare` returns, and say what that took."""
        ids = prepare()
        chat, model, config = self.now, self._model, self._settings.run
        tiers = tokens_by_tier(model.manager, chat.context.cache.sequences)
        warn_if_long(model.hf_model, ids.shape[1] + config.max_new_tokens)
        before, run = model.stats()["prefill"]["tokens"], Run(ids.shape[1])
        run.start = time.perf_counter()
        config = replace(config, seed=config.seed + self._turns)  # or all would be drawn alike
        try:
            output = stream(
                model, self._tokenizer, ids, chat.context.cache, config, run, sys.stdout
            )
        except BaseException:
            chat.retract()
            raise
        if not run.token_ids:
            chat.retract()
            _say("[stopped before the answer began; the message was taken back]")
            return
        chat.answer(output)
        self._turns += 1
        computed = model.stats()["prefill"]["tokens"] - before + 1  # the last one gives logits
        _say(_report(run, ids.shape[1] - computed, computed, tiers, chat.dropped))

    def _edit(self, text: str) -> None:
        if not text:
            raise ConfigError("/edit needs the new text of your last message")
        self._turn(lambda: self.now.edit(text))

    def _fork(self, name: str) -> None:
        self._check_new(name, "/fork")
        self.now = self.now.fork(name)
        self._open.append(self.now)
        _say(f"[now in {name!r}; it shares {self.now.context.tokens:,} tokens]")

    def _switch(self, name: str) -> None:
        known = {*self._names(), *self._saved()}
        if name not in known:
            raise ConfigError(f"no chat {name!r}; there are: {', '.join(sorted(known)) or 'none'}")
        self.now = self._opened(name)

    def _save(self, name: str) -> None:
        former = self.now.context.name
        if name and name != former:
            self._check_new(name, "/save")
            self.now.context.name = name
        elif former is None:
            raise ConfigError("this chat has no name: /save NAME")
        try:
            self._keep(self.now)
        except TierKVError:
            self.now.context.name = former
            raise

    def _list(self, _: str) -> None:
        for one in self._open:
            mark = "*" if one is self.now else " "
            name = one.context.name or "(no name)"
            _say(f"{mark} {name:<24} {one.context.ids.shape[1]:>9,} tokens {len(one.messages):>4} "
                 f"messages")  # fmt: skip
        for name in self._saved():
            if name not in self._names():
                _say(f"  {name:<24} saved")

    def _stats(self, _: str) -> None:
        stats = self._model.stats()
        print_tiers(stats, self._settings.tiers.store)
        _say(f"{stats['prefill']['tokens']:,} tokens prefilled in {self._turns} turns")

    def _opened(self, name: str | None) -> Conversation:
        for one in self._open:
            if name is not None and one.context.name == name:
                return one
        context = self._model.open(name)
        try:
            one = Conversation(context, self._tokenizer, self._system)
        except BaseException:
            context.close()
            raise
        self._open.append(one)
        if context.tokens:
            how = f"{context.restored_tokens:,} tokens read from the store"
            if context.recomputed:
                how = f"{context.tokens:,} tokens computed again: {context.recomputed}"
            _say(f"[{name!r}: {len(one.messages)} messages, {how}]")
        return one

    def _keep(self, one: Conversation) -> None:
        pages = one.context.save()
        _say(f"[saved {one.context.name!r}: {one.context.tokens:,} tokens, {pages:,} new pages]")

    def _check_new(self, name: str, command: str) -> None:
        if not name:
            raise ConfigError(f"{command} needs a name")
        if name in self._names() or name in self._saved():
            raise ConfigError(f"there is a context {name!r} already; choose another name")

    def _names(self) -> set[str]:
        return {one.context.name for one in self._open if one.context.name is not None}

    def _saved(self) -> list[str]:
        saved: list[str] = self._model.saved() if self._settings.tiers.store else []
        return saved


def _report(run: Run, reused: int, computed: int, tiers: dict[str, int], dropped: int) -> str:
    parts = [f"{tier} {count:,}" for tier, count in tiers.items() if count]
    where = f" ({', '.join(parts)})" if parts else ""
    text = f"reused {reused:,} tokens{where}, computed {computed:,}"
    if dropped:
        text += f" (the {dropped:,} held after the first change were dropped)"
    text += f", generated {len(run.token_ids):,}"
    if run.ttft_seconds is not None:
        text += f"; {run.ttft_seconds:.2f} s to the first token"
    return f"[{text}{'; stopped' if run.finish == 'interrupted' else ''}]"


def _one_line(error: TierKVError) -> str:
    return f"tierkv: error: {' '.join(str(error).split())}"


def _lines() -> Iterator[str]:
    """Yield lines that are not empty: with a prompt on a terminal, else as they are piped in."""
    if sys.stdin.isatty():
        import readline  # noqa: F401 (line editing in input)

        yield from _typed()
        return
    for raw in getattr(sys.stdin, "buffer", sys.stdin):
        try:
            line = (raw.decode("utf-8") if isinstance(raw, bytes) else raw).strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is not UTF-8 text: {error}") from None
        if line:
            yield line


def _typed() -> Iterator[str]:
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            _say("")
            return
        except KeyboardInterrupt:
            _say("\n(/quit or Ctrl-D leaves)")
            continue
        if line:
            yield line


def _say(text: str) -> None:
    """Print what is not the model's on stderr, after all that is."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
