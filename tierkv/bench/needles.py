"""Needle retrieval: one odd sentence in a long text, and whether the model can repeat it.

The context is prefilled; question and answer are decoded, so that what is read for them is
selected. Answers are teacher-forced: small models fail at free generation for other reasons.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierkv.bench.forced import Setting, forced
from tierkv.bench.workload import Progress
from tierkv.errors import ConfigError

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Where the needle lies, as a share of the context; seeds take turns."""
NAMES = ("Alder", "Birch", "Cedar", "Hazel", "Juniper", "Laurel", "Maple", "Rowan", "Willow")
DIGITS = 5


@dataclass(frozen=True, slots=True)
class Needle:
    """One question about one context.

    Attributes:
        context, question, answer: token ids, in this order one sequence.
        depth: share of the context before the needle, as asked for.
    """

    context: list[int]
    question: list[int]
    answer: list[int]
    depth: float


def make(tokenizer: Any, text: str, tokens: int, seed: int) -> Needle:
    """Return a context of at most `tokens`: sentences from a random place on, and the needle.

    Raises:
        ConfigError: the text is too short; names the flag.
    """
    chance = random.Random(seed)
    name, number = chance.choice(NAMES), "".join(chance.choices("0123456789", k=DIGITS))
    depth = DEPTHS[seed % len(DEPTHS)]

    def encode(part: str) -> list[int]:
        return [int(token) for token in tokenizer(part, add_special_tokens=False).input_ids]

    sentences = [encode(f" {part}") for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]
    first = [int(token) for token in tokenizer("").input_ids]
    needle = encode(f" The secret number of {name} is {number}.")
    room, whole = tokens - len(first) - len(needle), sum(map(len, sentences))
    if room < 1 or whole < room:
        raise ConfigError(
            f"--tokens {tokens}: needles of {len(needle)} tokens want a --text of at least as many "
            f"tokens, but it has {whole}"
        )
    after, starts = whole, []
    for index, sentence in enumerate(sentences):
        if after >= room:
            starts.append(index)
        after -= len(sentence)
    chosen: list[list[int]] = []
    for sentence in sentences[chance.choice(starts) :]:
        room -= len(sentence)
        if room < 0:
            break
        chosen.append(sentence)
    before, size, place = 0, sum(map(len, chosen)), 0
    while place < len(chosen) and before + len(chosen[place]) <= depth * size:
        before += len(chosen[place])
        place += 1
    chosen.insert(place, needle)
    question = encode(f"\n\nQuestion: What is the secret number of {name}?\n"
                      f"Answer: The secret number of {name} is")  # fmt: skip
    answer = encode(f" {number}")
    while not str(tokenizer.decode(answer[:1])).strip():  # a space of its own tells nothing
        question.append(answer.pop(0))
    return Needle([*first, *(token for part in chosen for token in part)], question, answer, depth)


def right(logits: torch.Tensor, answer: Sequence[int]) -> int:
    """Return how many answer tokens the last ``[steps, vocab]`` logits predict."""
    return int((logits[-len(answer) :].argmax(-1) == torch.tensor(answer)).sum())


def run(
    model: Any,
    tokenizer: Any,
    text: str,
    tokens: int,
    seeds: int,
    settings: Sequence[Setting],
    tiers: dict[str, Any],
    say: Progress,
    save: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Return a row per setting over all seeds; `save` gets the rows after every seed.

    Raises:
        ConfigError: the text is too short; names the flag.
    """
    rows = [{**setting.row(), "needles": 0, "answer_tokens": 0, "right": 0, "whole": 0,
             "score": 0.0, "by_depth": {}, "tokens_read": 0.0, "kv_share": 0.0, "seconds": 0.0}
            for setting in settings]  # fmt: skip
    for seed in range(seeds):
        needle = make(tokenizer, text, tokens, seed)
        ids = torch.tensor([needle.context + needle.question + needle.answer], device=model.device)

        def named(what: str, done: int, total: int, seed: int = seed) -> None:
            say(f"needle {seed + 1}/{seeds}: {what}", done, total)

        runs = forced(model, ids, len(needle.context), settings, tiers, named)
        for row, found in zip(rows, runs, strict=True):
            add(row, needle, right(found.logits, needle.answer))
            for name in ("tokens_read", "kv_share"):
                row[name] += (getattr(found, name) - row[name]) / row["needles"]
            row["seconds"] += found.seconds
        save(rows)
    return rows


def add(row: dict[str, Any], needle: Needle, count: int) -> None:
    """Count a needle of whose answer tokens `count` were right."""
    row["needles"] += 1
    row["answer_tokens"] += len(needle.answer)
    row["right"] += count
    row["whole"] += count == len(needle.answer)
    row["score"] = row["right"] / row["answer_tokens"]
    depth = row["by_depth"].setdefault(f"{needle.depth:.1f}", [0, 0])
    depth[0] += count
    depth[1] += len(needle.answer)
