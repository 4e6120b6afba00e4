"""Random programs of everything a context can do, against a plain model that remembers nothing.

Whatever came before, the next greedy tokens are those that transformers computes from all tokens
anew; every block has as many references as holders, and no page of a saved context is ever lost.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import tierkv
from tests.combinations import examples
from tests.models import VOCAB, tiny_model
from tests.paging_helpers import budgets
from tierkv.hf.context import Context
from tierkv.paging import manifest
from tierkv.paging.keys import KEPT_PREFIX
from tierkv.paging.tierset import SESSION_PREFIX

MAX_OPEN = 3
CORPUS = torch.randint(3, VOCAB, (400,), generator=torch.Generator().manual_seed(0)).tolist()
COUNTS = st.one_of(st.sampled_from([1, 15, 16, 17]), st.integers(1, 70))

EVERYTHING = {
    "attention": "selective", "token_budget": 4096, "max_context": 4096, "sink_tokens": 16,
    "recent_tokens": 32, "dense_layers": 1,
}  # fmt: skip
"""Selective attention whose budget holds everything, so that it is exact."""


@functools.cache
def models() -> tuple[Any, Any]:
    """The wrapped model, and one like it that stays as it is."""
    return tuple(tiny_model("llama", num_hidden_layers=2) for _ in range(2))  # type: ignore[return-value]


@functools.lru_cache(10_000)
def recomputed(ids: tuple[int, ...], count: int) -> list[int]:
    plain = models()[1]
    output = plain.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return output[0, len(ids) :].tolist()


class Programs(RuleBasedStateMachine):
    """Open contexts beside the tokens they must hold, and the same for saved ones."""

    @initialize(
        kind=st.sampled_from(["hot", "warm", "cold", "cold", "minimum"]),
        keeps=st.booleans(),
        selects=st.booleans(),
    )
    def start(self, kind: str, keeps: bool, selects: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.stores = 0
        chosen = budgets(kind, models()[0], self.directory, page_tokens=16, rows=MAX_OPEN + 1)
        disk = {"disk_budget": "16MiB", "disk_floor": 0, "cpu_budget": "1MiB"}
        self.settings = disk | chosen | {"prefix_cache": keeps, "prefill_chunk": 50}
        if selects:
            self.settings |= EVERYTHING
            if kind != "hot":
                self.settings["gpu_budget"] += 1 << 20  # summaries of max_context tokens
        self.contexts: list[tuple[Context, list[int]]] = []
        self.saved: dict[str, list[int]] = {}
        self.wrap()

    def wrap(self) -> None:
        store = self.directory / str(self.stores)
        self.model = tierkv.wrap(models()[0], **self.settings | {"store": str(store)})
        assert not list(self.cold.keys(SESSION_PREFIX)), "pages of the last process"

    @property
    def cold(self) -> Any:
        return self.model.manager.cold

    def pick(self, data: st.DataObject) -> tuple[Context, list[int]]:
        return self.contexts[data.draw(st.integers(0, len(self.contexts) - 1), "context")]

    def check(self, context: Context, ids: list[int]) -> None:
        assert context.ids[0].tolist() == ids
        assert context.tokens in (len(ids), max(len(ids) - 1, 0))

    @precondition(lambda self: len(self.contexts) < MAX_OPEN)
    @rule(count=COUNTS, at=st.sampled_from([0, 0, 0, 200]))
    def open(self, count: int, at: int) -> None:
        context, ids = self.model.open(), CORPUS[at : at + count]
        context.append(torch.tensor([ids]))
        self.contexts.append((context, list(ids)))

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), count=COUNTS)
    def append(self, data: st.DataObject, count: int) -> None:
        context, ids = self.pick(data)
        new = CORPUS[len(ids) % 200 :][:count]  # so that contexts often go on alike
        context.append(torch.tensor([new]))
        ids += new
        self.check(context, ids)

    @precondition(lambda self: 0 < len(self.contexts) < MAX_OPEN)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        context, ids = self.pick(data)
        self.contexts.append((context.fork(), list(ids)))

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), new=COUNTS)
    def edit(self, data: st.DataObject, new: int) -> None:
        context, ids = self.pick(data)
        at = data.draw(st.integers(0, len(ids)), "from_token")
        computed = context.edit(at, torch.tensor([CORPUS[-new:]]))
        ids[at:] = CORPUS[-new:]
        assert 1 <= computed <= len(ids)
        self.check(context, ids)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), count=st.integers(1, 4))
    def generate(self, data: st.DataObject, count: int) -> None:
        context, ids = self.pick(data)
        got = context.generate(max_new_tokens=count, do_sample=False)[0].tolist()
        assert got == recomputed(tuple(ids), count)
        ids += got
        self.check(context, ids)

    @rule(count=COUNTS)
    def request(self, count: int) -> None:
        """One that keeps no context."""
        with_cache = self.model.cache()
        ids = CORPUS[:count]
        argument = {self.model.cache_argument(): with_cache}
        got = self.model.generate(
            torch.tensor([ids]), max_new_tokens=2, do_sample=False, **argument
        )
        assert got[0, count:].tolist() == recomputed(tuple(ids), 2)
        with_cache.close()

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), name=st.sampled_from("ab"))
    def save(self, data: st.DataObject, name: str) -> None:
        context, ids = self.pick(data)
        context.name = name
        context.save()
        self.saved[name] = list(ids)

    @precondition(lambda self: self.saved and len(self.contexts) < MAX_OPEN)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)), "name")
        before = self.model.stats()["prefill"]["tokens"]
        context = self.model.open(name)
        assert self.model.stats()["prefill"]["tokens"] == before
        self.contexts.append((context, list(self.saved[name])))
        self.check(*self.contexts[-1])

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.saved)), "name")
        self.model.forget(name)
        del self.saved[name]

    @rule(pages=st.integers(1, 6))
    def evict(self, pages: int) -> None:
        if self.model.manager.prefix is not None:
            self.model.manager.prefix.evict(pages)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.contexts) - 1), "context")
        self.contexts.pop(at)[0].close()

    @rule()
    def crash(self) -> None:
        """The next process finds the store as it was when this one died."""
        tiers, outflow = self.model.manager.tiers, self.model.manager.outflow
        with tiers.changed:  # the copy itself must not see half a write
            tiers.changed.wait_for(lambda: not (outflow._queued or outflow._writing), 20)
            old, new = (self.directory / str(self.stores + more) for more in (0, 1))
            shutil.copytree(old, new, ignore=shutil.ignore_patterns("owner.lock"))
        self.model.close()
        self.contexts.clear()
        self.stores += 1
        self.wrap()

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "model"):
            return
        manager = self.model.manager
        held: Counter[int] = Counter()
        for context, _ in self.contexts:
            held.update(context.cache.sequences.blocks.reshape(-1).tolist())
        if manager.prefix is not None:
            for node in manager.prefix.tree.walk():
                held.update(node.blocks.tolist())
        refs = manager.directory.refs
        assert {int(b): int(refs[b]) for b in refs.nonzero()[0]} == dict(held)
        assert self.model.saved() == sorted(self.saved)
        stored, named = set(self.cold.keys(KEPT_PREFIX)), set()
        for name, ids in self.saved.items():
            kept, found = manifest.read(self.cold, name)
            assert found.tolist() == ids
            named |= kept.page_keys(found)
        assert named <= stored, "a page of a saved context is gone"

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        manager = self.model.manager
        for context, ids in self.contexts:
            got = context.generate(max_new_tokens=1, do_sample=False)[0].tolist()
            assert got == recomputed(tuple(ids), 1)
            context.close()
        if manager.prefix is not None:
            manager.prefix.clear()
        assert manager.directory.live == manager.hot.pages == 0
        with manager.tiers.changed:
            assert manager.tiers.changed.wait_for(lambda: not manager.warm.pages, 20)
        assert not list(self.cold.keys(SESSION_PREFIX))
        self.model.close()
        shutil.rmtree(self.directory)


Programs.TestCase.settings = settings(
    max_examples=examples(12), stateful_step_count=25, deadline=None
)
TestPrograms = Programs.TestCase
