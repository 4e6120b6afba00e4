"""Chats: every token is computed once, and answers equal those of a prompt never seen before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tierkv
from tierkv.errors import ConfigError, TierKVError
from tierkv.hf.conversation import Conversation
from tierkv.paging.whereabouts import tokens_by_tier

CHATML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
"""Renders the past as it rendered it before, but for the end of an answer."""
NEW = {"max_new_tokens": 9, "do_sample": False, "suppress_tokens": [0, 1, 2]}
"""The random model must not say what only the template says."""


@pytest.fixture(scope="module")
def parts(tiny_model_dir: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = CHATML
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir), tokenizer


class Counted:
    """A wrapped model that counts the tokens its forward is given."""

    def __init__(self, hf_model: Any, **settings: Any):
        self.tokens, self._hf_model = 0, hf_model
        self._hook = hf_model.model.register_forward_pre_hook(self._count, with_kwargs=True)
        self.model = tierkv.wrap(hf_model, page_tokens=16, **settings)

    def _count(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.tokens += kwargs["input_ids"].shape[1]

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self.model.close()


@pytest.fixture
def counted(parts: tuple[Any, Any]) -> Iterator[Counted]:
    with Counted(parts[0]) as wrapped:
        yield wrapped


def turn(chat: Conversation, ids: torch.Tensor) -> str:
    """Answer a prompt; return the answer's text."""
    model = chat.context.model
    argument = model.cache_argument()
    output = model.generate(ids, **{argument: chat.context.cache}, **NEW)
    return chat.answer(output)


def fresh(model: Any, ids: torch.Tensor) -> list[int]:
    """All tokens of a prompt and its answer, computed from nothing."""
    tokens: list[int] = model.generate(ids, **NEW)[0].tolist()
    return tokens


def test_twenty_turns_compute_only_new_tokens(counted: Counted, parts: tuple[Any, Any]) -> None:
    """Every token is computed once, though the template renders the whole history each time.

    Answers of the random model are not even text: rendered and read again they are other tokens.
    """
    chat = Conversation(counted.model.open(), parts[1], "Be brief.")
    prompts, answers, held = [], [], 0
    for number in range(20):
        before, computed = len(chat.context.ids[0]), counted.tokens
        ids = chat.ask(f"What about {number}?")
        assert (chat.reused, chat.dropped) == (held, 0)
        answers.append(turn(chat, ids))
        prompts.append(ids)
        held = chat.context.tokens
        assert held == chat.context.ids.shape[1] - 1, "the last token of an answer is not computed"
        assert counted.tokens - computed == held - max(0, before - 1)
    assert counted.tokens == held
    assert any("\ufffd" in answer for answer in answers), "no answer was hard to render"
    assert counted.model.stats()["prefill"]["tokens"] < held
    for ids in (prompts[7], prompts[19]):
        assert fresh(counted.model, ids) == chat.context.ids[0, : ids.shape[1] + 9].tolist()


def test_a_template_that_changes_the_past_costs_the_suffix(
    counted: Counted, parts: tuple[Any, Any]
) -> None:
    """As those do that leave the reasoning of earlier answers out."""
    tokenizer = parts[1]
    chat = Conversation(counted.model.open(), tokenizer)
    turn(chat, chat.ask("First"))
    held, computed = chat.context.tokens, counted.tokens
    changing = CHATML.replace("{{ m['content'] }}", "{{ m['content'][:4] }}")
    tokenizer.chat_template = changing
    try:
        ids = chat.ask("Second")
    finally:
        tokenizer.chat_template = CHATML
    shared = len("<s>user\nFirs") - 2  # <s> is one token
    assert (chat.reused, chat.dropped) == (shared, held - shared)
    turn(chat, ids)
    assert counted.tokens - computed == chat.context.tokens - shared
    assert fresh(counted.model, ids) == chat.context.ids[0].tolist()


def test_edit(counted: Counted, parts: tuple[Any, Any]) -> None:
    chat = Conversation(counted.model.open(), parts[1])
    with pytest.raises(ConfigError, match="no message to edit"):
        chat.edit("x")
    turn(chat, chat.ask("One"))
    first = chat.context.tokens
    turn(chat, chat.ask("A long and winding question"))
    computed, asked = counted.tokens, chat.context.ids
    ids = chat.edit("A long and short question")
    same = len("</s>\n<s>user\nA long and ") - 5  # </s> and <s> are one token each
    assert chat.reused == first + 1 + same
    turn(chat, ids)
    assert counted.tokens - computed == chat.context.tokens - chat.reused
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    assert fresh(counted.model, ids) == chat.context.ids[0].tolist()
    assert chat.context.ids.tolist() != asked.tolist()


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_failed_answer_leaves_the_chat_as_it_was(
    counted: Counted, parts: tuple[Any, Any], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prefill and midway through an answer; after an edit, too, nothing is lost."""
    chat = Conversation(counted.model.open(), parts[1])
    turn(chat, chat.ask("One"))
    turn(chat, chat.ask("Two"))
    messages, ids = list(chat.messages), chat.context.ids.tolist()
    layer = parts[0].model.layers[1]
    real, left = layer.forward, calls

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise TierKVError("out of room")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", failing)
        for prepare in (chat.ask, chat.edit):
            left = calls
            with pytest.raises(TierKVError, match="out of room"):
                turn(chat, prepare("Three"))
            chat.retract()
            assert chat.messages == messages
            assert chat.context.ids.tolist() == ids
            assert chat.context.tokens <= len(ids[0])
    prompt = chat.ask("Three")
    turn(chat, prompt)
    assert fresh(counted.model, prompt) == chat.context.ids[0].tolist()


def test_forks_go_on_alone(counted: Counted, parts: tuple[Any, Any]) -> None:
    chat = Conversation(counted.model.open(), parts[1])
    turn(chat, chat.ask("One"))
    twin = chat.fork()
    computed = counted.tokens
    for one, text in ((chat, "Two"), (twin, "Three"), (chat, "Four")):
        ids = one.ask(text)
        assert one.dropped == 0
        turn(one, ids)
        new, computed = counted.tokens - computed, counted.tokens
        assert new < 40
        assert fresh(counted.model, ids) == one.context.ids[0].tolist()
        computed = counted.tokens
    assert [m["content"] for m in twin.messages if m["role"] == "user"] == ["One", "Three"]
    assert [m["content"] for m in chat.messages if m["role"] == "user"] == ["One", "Two", "Four"]


def test_a_chat_outlives_the_process(parts: tuple[Any, Any], tmp_path: Path) -> None:
    hf_model, tokenizer = parts
    settings = {"store": str(tmp_path), "disk_floor": "1MiB"}
    with Counted(hf_model, **settings) as wrapped:
        chat = Conversation(wrapped.model.open("talk"), tokenizer, "Be brief.")
        turn(chat, chat.ask("One"))
        chat.context.save()
        messages, held = chat.messages, chat.context.tokens
        want = turn(chat, chat.ask("Two"))
    with Counted(hf_model, **settings) as wrapped:
        chat = Conversation(wrapped.model.open("talk"), tokenizer)
        assert chat.messages == messages
        ids = chat.ask("Two")
        assert (chat.reused, chat.dropped) == (held, 0)
        where = tokens_by_tier(wrapped.model.manager, chat.context.cache.sequences)
        assert sum(where.values()) == held
        assert turn(chat, ids) == want
        assert wrapped.tokens == chat.context.tokens - held
        with wrapped.model.open("plain") as plain:
            plain.append(ids)
            with pytest.raises(ConfigError, match="'plain' is saved, but it is no chat"):
                Conversation(plain, tokenizer)


def test_what_no_template_can_say(counted: Counted, parts: tuple[Any, Any]) -> None:
    chat = Conversation(counted.model.open(), parts[1])
    turn(chat, chat.ask("One"))
    before = list(chat.messages)
    parts[1].chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(ConfigError, match="template refuses this: roles must alternate"):
            chat.ask("Two")
        parts[1].chat_template = None
        with pytest.raises(ConfigError, match="no chat template"):
            Conversation(counted.model.open(), parts[1])
    finally:
        parts[1].chat_template = CHATML
    assert chat.messages == before


def test_tokens_by_tier_add_up(parts: tuple[Any, Any], tmp_path: Path) -> None:
    page = 16 * 2 * 2 * 16 * 4
    with tierkv.wrap(
        parts[0], page_tokens=16, gpu_budget=8 * page, cpu_budget=8 * page, store=str(tmp_path),
        disk_budget="64MiB", disk_floor="1MiB",
    ) as model:  # fmt: skip
        assert tokens_by_tier(model.manager, model.cache().sequences)["hot"] == 0
        with model.open() as context:
            context.append(torch.arange(3, 203)[None])
            where = tokens_by_tier(model.manager, context.cache.sequences)
            assert sum(where.values()) == 200
            assert all(where.values())
