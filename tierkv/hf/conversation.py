"""A chat: messages, and a context that holds their tokens.

Chat templates render the whole history at every turn. What the context holds already is kept:
the past is compared as text first, so that an answer keeps the very tokens that were generated
(the tokenizer may cut the same text differently), and as tokens where a template changes what it
once rendered. Only what follows the first difference is computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from jinja2 import TemplateError

from tierkv.errors import ConfigError
from tierkv.hf.context import Context

Message = dict[str, str | int]


class Conversation:
    """Messages of a chat and their context.

    Args:
        context: empty, or one that holds a chat.
        tokenizer: with a chat template.
        system: first message of a new chat, or None.

    Attributes:
        reused: tokens of the last prompt that the context held.
        dropped: tokens that the context held but that prompt, for a template that changes what it
            once rendered or after an edit, does not begin with.

    Raises:
        ConfigError: the tokenizer has no chat template, or the context holds something else.
    """

    def __init__(self, context: Context, tokenizer: Any, system: str | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("this model's tokenizer has no chat template: use tierkv generate")
        if context.messages is None:
            if context.tokens:
                raise ConfigError(f"context {context.name!r} is saved, but it is no chat")
            context.messages = [] if system is None else [{"role": "system", "content": system}]
        self.context, self._tokenizer = context, tokenizer
        self.reused = self.dropped = 0
        self._before = context.ids, self.messages

    @property
    def messages(self) -> list[Message]:
        """All messages, oldest first; they are saved with the context."""
        assert self.context.messages is not None
        return self.context.messages

    def ask(self, text: str) -> torch.Tensor:
        """Add a message of the user; return the prompt, ``[1, tokens]``, for an answer to it.

        The context is cut to what it shares with the prompt. Call `answer` or `retract` next.

        Raises:
            ConfigError: the template refuses the messages; nothing changed.
        """
        return self._ask(self.messages, text)

    def edit(self, text: str) -> torch.Tensor:
        """Replace the last message of the user, and what followed; as `ask` otherwise.

        Raises:
            ConfigError: there is none, or the template refuses the messages; nothing changed.
        """
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise ConfigError("there is no message to edit yet")
        return self._ask(self.messages[: asked[-1]], text)

    def _ask(self, past: list[Message], text: str) -> torch.Tensor:
        messages: list[Message] = [*past, {"role": "user", "content": text}]
        try:
            ids = self._prompt(messages)
        except TemplateError as error:
            raise ConfigError(f"the chat template refuses this: {error}") from error
        self._before = self.context.ids, self.messages
        self.context.messages, held = messages, self.context.tokens
        self.reused = self.context.rewind(ids)
        self.dropped = held - self.reused
        return self.context.ids

    def answer(self, ids: torch.Tensor) -> str:
        """Add what was generated: `ids`, ``[1, n]``, begin with the prompt. Returns its text."""
        text: str = self._decode(ids[0, self.context.ids.shape[1] :], skip_special_tokens=True)
        self.context.ids = ids
        self.messages.append({"role": "assistant", "content": text, "tokens": ids.shape[1]})
        return text

    def retract(self) -> None:
        """Undo `ask` or `edit` after an answer failed; the context is whole again."""
        cache = self.context.cache
        cache.rollback()
        if cache.get_seq_length() > self.reused:
            cache.crop(self.reused - cache.get_seq_length())
        self.context.ids, self.context.messages = self._before

    def fork(self, name: str | None = None) -> Conversation:
        """Return a chat of its own with the same past; see `Context.fork`."""
        twin = self.context.fork(name)
        twin.messages = [dict(message) for message in self.messages]
        return Conversation(twin, self._tokenizer)

    def _prompt(self, messages: list[Message]) -> torch.Tensor:
        """Return the tokens of messages, ``[1, n]``: those of the past as they were."""
        plain = [{name: m[name] for name in ("role", "content")} for m in messages]
        text: str = self._tokenizer.apply_chat_template(
            plain, tokenize=False, add_generation_prompt=True
        )
        end = max((int(m["tokens"]) for m in messages if "tokens" in m), default=0)
        past = self.context.ids[0, :end]
        known = self._decode(past)
        if len(past) < end or not text.startswith(known):
            past, known = past[:0], ""
        rest = self._tokenizer(text[len(known) :], add_special_tokens=False)["input_ids"]
        return torch.cat([past, torch.tensor(rest, dtype=past.dtype, device=past.device)])[None]

    def _decode(self, ids: torch.Tensor, *, skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text
