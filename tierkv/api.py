"""The public object: a Hugging Face model whose KV cache lives in three tiers."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch

from tierkv.codecs import CODECS
from tierkv.config import Config
from tierkv.errors import ClosedError, ConfigError, UnsupportedModelError
from tierkv.hf import prefill as hf_prefill
from tierkv.hf import reuse
from tierkv.hf.attach import attach, cache_argument, compute_device, detach
from tierkv.hf.breakeven import Rates
from tierkv.hf.cache import TierCache
from tierkv.hf.context import Context
from tierkv.hf.generation import (
    copies_of,
    infer_mask,
    may_lay_out,
    only_new_tokens,
    replayed,
    setting,
)
from tierkv.hf.geometry import model_geometry, stores_latents
from tierkv.hf.graph import decode_graph
from tierkv.page import Geometry
from tierkv.paging import manifest
from tierkv.paging.manager import PageManager
from tierkv.paging.saved import store_of
from tierkv.paging.selective import Selective
from tierkv.selection.settings import selective_settings
from tierkv.tiers.frame_format import FrameFormat
from tierkv.tiers.packed import open_store

CACHE_ARGUMENTS = ("past_key_values", "cache")
"""What transformers calls the cache: the first until 5.23, the second from 5.24."""


class TieredModel:
    """A wrapped model. Use it as a context manager, or call `close`.

    `generate` has the signature and the return of transformers' own; `cache()` gives a cache to
    pass to the model's own `generate` or `forward`.
    """

    def __init__(self, hf_model: Any, config: Config):
        self.config = config
        self.hf_model = hf_model
        self._prefilled = {"tokens": 0, "seconds": 0.0}
        self.rates = Rates()
        self._last_report: dict[str, Any] | None = None
        self._closed = False
        text = hf_model.config.get_text_config(decoder=True)
        self._latents = stores_latents(hf_model)
        geometry = model_geometry(text, hf_model.dtype, config.page_tokens, latents=self._latents)
        device = compute_device(hf_model)
        former = attach(hf_model)
        try:
            self.manager = self._make_manager(geometry, device)
        except BaseException:
            detach(hf_model, former)
            raise
        self._former, self._text_config = former, text
        if config.prefix_cache and (self.manager is None or self.cache().tiered_in_part):
            self.close()
            raise UnsupportedModelError(
                f"{type(hf_model).__name__} has layers with bounded state of their own (windows, "
                f"recurrence), which is not in pages: prefix_cache cannot be used with it"
            )

    def _make_manager(self, geometry: Any, device: torch.device) -> PageManager | None:
        if geometry is None:
            warnings.warn(
                f"{type(self.hf_model).__name__} has no full-attention layer: all its state is "
                f"bounded and stays on the device, so tierkv gains nothing here",
                stacklevel=4,
            )
            return None
        config, cold = self.config, None
        codec = CODECS[config.codecs.warm]
        layout = FrameFormat(geometry, codec)
        if config.attention == "selective" and device.type == "cuda":
            layout.check_fetch()
        if config.store is not None:
            cold = open_store(
                config.store,
                layout,
                config.codecs.zstd_level,
                threads=config.io_threads,
                always=config.codecs.always_zstd,
                disk_budget=config.disk_budget,
                free_floor=config.disk_floor,
                writes_per_day=config.disk_writes_per_day,
            )
        try:
            return PageManager(
                geometry,
                device,
                gpu_budget=config.gpu_budget,
                cpu_budget=config.cpu_budget,
                cold=cold,
                io_threads=config.io_threads,
                selective=self._selective(geometry, device),
                codec=codec,
                encode_hot=config.codecs.hot != "raw",
                residual_tokens=config.residual_tokens,
                salt=config.salt,
                prefix_cache=config.prefix_cache,
            )
        except BaseException:
            if cold is not None:
                cold.close()
            raise

    def _selective(self, geometry: Geometry, device: torch.device) -> Selective | None:
        """Return what selective attention needs, or None if it is not asked for."""
        if self.config.attention == "exact":
            return None
        if self._latents:
            raise UnsupportedModelError(
                f"{type(self.hf_model).__name__} stores latents, not keys: attention='selective' "
                f"cannot rank its pages; use attention='exact'"
            )
        limit = self.hf_model.config.get_text_config(decoder=True).max_position_embeddings
        return selective_settings(self.config, geometry, device, limit)

    def cache(self) -> TierCache:
        """Return an empty cache for the model's own `generate` or `forward`."""
        self._check_open()
        return TierCache(self._text_config, self.manager)

    def open(self, name: str | None = None) -> Context:
        """Return the context saved under a name, or an empty one of that name.

        Without a name it is an empty one, which needs no store and gets its name when it is saved.

        Raises:
            ConfigError: there is no store, or the context is another model's.
            ColdReadError: its pages are missing or damaged.
        """
        self._check_open()
        context = Context(self, name)
        try:
            context.restore()
        except BaseException:
            context.close()
            raise
        return context

    def saved(self) -> list[str]:
        """Return the names of all saved contexts in the store."""
        self._check_open()
        if self.manager is None:
            return []
        return manifest.names(store_of(self.manager))

    def forget(self, name: str) -> int:
        """Delete a saved context and the pages that no other one shares; return how many pages.

        Pages that an open context still reads from the store stay there, without a name.

        Raises:
            ConfigError: there is none of that name.
        """
        self._check_open()
        if self.manager is None:
            raise ConfigError(f"no context {name!r}: this model has no pages")
        return manifest.forget(store_of(self.manager), name, self.manager.directory.saved.values())

    def cache_argument(self) -> str:
        """Return what the model calls its cache: ``past_key_values``, or ``cache`` from 5.24."""
        return cache_argument(self.hf_model)

    def prefill(
        self,
        input_ids: torch.Tensor,
        tier_cache: TierCache,
        *,
        attention_mask: torch.Tensor | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Any:
        """Run a prompt into a cache in chunks; see `tierkv.prefill`."""
        self._check_open()
        self._check_own(tier_cache)
        self._check_batch(len(input_ids), attention_mask)
        if self.config.prefix_cache:
            reuse.begin(
                tier_cache, self.hf_model, input_ids, attention_mask, input_ids.shape[1] - 1
            )
        start, before = time.perf_counter(), tier_cache.get_seq_length()
        output = hf_prefill.prefill(
            self.hf_model,
            input_ids,
            tier_cache,
            chunk_tokens=self.config.prefill_chunk or hf_prefill.default_chunk(self.hf_model),
            attention_mask=attention_mask,
            on_progress=on_progress,
        )
        if output is not None and input_ids.device.type == "cuda":
            torch.cuda.synchronize(input_ids.device)
        self._prefilled["tokens"] += tier_cache.get_seq_length() - before
        seconds = time.perf_counter() - start
        self._prefilled["seconds"] += seconds
        if before == 0 and len(input_ids) == 1:
            self.rates.computed(tier_cache.get_seq_length(), seconds)
        if self.config.prefix_cache:
            reuse.keep(tier_cache, input_ids, attention_mask)
        return output

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        on_prefill: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate like ``hf_model.generate``, with the prompt prefilled in chunks first.

        Beams and samples share the pages of their prompt. All keyword arguments are passed on.

        Args:
            inputs: ``[batch, tokens]`` prompt ids (or ``input_ids=``).
            on_prefill: called with (prompt tokens done, in total) after each chunk.

        Raises:
            ConfigError: an argument contradicts what tierkv does itself.
            ConfigError, UnsupportedModelError: attention is selective, and the batch is larger than
                `max_batch`, or has padding.
        """
        self._check_open()
        input_ids = kwargs.pop("input_ids", inputs)
        if input_ids is None:
            raise ConfigError("generate needs input_ids (inputs_embeds are not supported)")
        self._refuse_arguments(kwargs)
        name = cache_argument(self.hf_model)
        given = [c for n in CACHE_ARGUMENTS if (c := kwargs.pop(n, None)) is not None]
        tier_cache = given[0] if given else self.cache()
        self._check_own(tier_cache)
        mask = kwargs.pop("attention_mask", None)
        if mask is None:
            mask = infer_mask(self.hf_model, input_ids, kwargs)
        self._check_batch(len(input_ids) * copies_of(self.hf_model, kwargs), mask)
        layout = None
        try:
            if self.config.prefix_cache and not given and may_lay_out(self.hf_model, kwargs):
                layout = reuse.lay_out(tier_cache, input_ids, mask)
            if layout is not None:
                input_ids, mask = layout.ids, layout.mask
            self._prefill_prompt(input_ids, mask, tier_cache, kwargs, on_prefill)
            seen = mask.repeat_interleave(copies_of(self.hf_model, kwargs), 0)
            asked = bool(self.config.cuda_graph) or self.config.attention == "selective"
            tokens = input_ids.shape[1]
            graph = decode_graph(self.hf_model, tier_cache, self.config, tokens, seen)
            replays = nullcontext() if graph is None else replayed(self.hf_model, graph, asked)
            with only_new_tokens(self.hf_model, tier_cache), replays:
                output = self.hf_model.generate(
                    input_ids, attention_mask=mask, **{name: tier_cache}, **kwargs
                )
        except BaseException:
            if not given:
                tier_cache.close()
            raise
        if self.config.prefix_cache and (setting(self.hf_model, kwargs, "num_beams") or 1) == 1:
            reuse.keep(tier_cache, getattr(output, "sequences", output), mask)
        if not given and isinstance(output, torch.Tensor):
            tier_cache.close()  # nobody else has it, and a collector may be late
        return output if layout is None else layout.restored(output)

    def _refuse_arguments(self, kwargs: dict[str, Any]) -> None:
        config = kwargs.get("generation_config")
        for name in ("prefill_chunk_size", "cache_implementation"):
            if kwargs.get(name) is not None or getattr(config, name, None) is not None:
                raise ConfigError(
                    f"{name} cannot be combined with tierkv; use prefill_chunk and the budgets"
                )
        for name in ("inputs_embeds", "position_ids"):
            if kwargs.get(name) is not None:
                raise ConfigError(f"generate takes input_ids and attention_mask only, not {name}")
        if setting(self.hf_model, kwargs, "use_cache") is False:
            raise ConfigError("use_cache=False contradicts tierkv, which is a cache")

    def _check_batch(self, rows: int, mask: torch.Tensor | None) -> None:
        """Refuse, before a long prefill, what selective attention could not go on with."""
        state = self.manager.selective if self.manager is not None else None
        if state is None:
            return
        state.check_room(rows, 0, self.config.page_tokens)
        if mask is not None and not bool(mask.all()):
            raise UnsupportedModelError(
                f"attention='selective' cannot hide padding, and attention_mask hides "
                f"{int((mask == 0).sum())} tokens; pass sequences of equal length"
            )

    def _check_own(self, tier_cache: Any) -> None:
        if not isinstance(tier_cache, TierCache) or tier_cache.manager is not self.manager:
            raise ConfigError(
                f"the cache must come from this model's cache(), got a {type(tier_cache).__name__}"
                f"{' of another model' if isinstance(tier_cache, TierCache) else ''}"
            )

    def _prefill_prompt(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        tier_cache: TierCache,
        kwargs: dict[str, Any],
        on_prefill: Callable[[int, int], None] | None,
    ) -> None:
        """Prefill all but the last token, once for all beams and samples of a prompt."""
        copies = copies_of(self.hf_model, kwargs)
        prompt, visible = input_ids[:, :-1], mask[:, :-1]
        fresh = tier_cache.get_seq_length() == 0
        if self.config.prefix_cache:
            reuse.begin(tier_cache, self.hf_model, input_ids, mask, prompt.shape[1])
        if not prompt.shape[1] or tier_cache.get_seq_length() > prompt.shape[1]:
            return
        late = fresh and copies > 1 and not any(tier_cache.is_linear)
        if copies > 1 and not late:
            prompt = prompt.repeat_interleave(copies, 0)
            visible = visible.repeat_interleave(copies, 0)
        self.prefill(prompt, tier_cache, attention_mask=visible, on_progress=on_prefill)
        if late:
            tier_cache.batch_repeat_interleave(copies)

    def stats(self) -> dict[str, Any]:
        """Return counters and the state of the tiers, the last one once closed (JSON types)."""
        return {**(self._last_report or self._report()), "prefill": dict(self._prefilled)}

    def _report(self) -> dict[str, Any]:
        return self.manager.report() if self.manager is not None else {}

    def close(self) -> None:
        """Release all memory and threads, close the store, and give the model back unchanged."""
        if self._closed:
            return
        self._closed = True
        detach(self.hf_model, self._former)
        self._last_report = copy.deepcopy(self._report())
        if self.manager is not None:
            self.manager.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the model was closed; wrap it again")

    def __enter__(self) -> TieredModel:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def wrap(hf_model: Any, **settings: Any) -> TieredModel:
    """Wrap a Hugging Face causal language model; settings are the fields of `Config`.

    Raises:
        ConfigError: an unknown or invalid setting.
        UnsupportedModelError: the model cannot work with tierkv; says why.
        BudgetError, StoreError: memory or the store cannot be had as asked.
    """
    return TieredModel(hf_model, Config.from_kwargs(**settings))


def prefill(
    model: TieredModel, input_ids: torch.Tensor, tier_cache: TierCache, **kwargs: Any
) -> Any:
    """Run a prompt into a cache in chunks and return the last chunk's output.

    Keyword arguments: `attention_mask` ``[batch, tokens]`` and `on_progress`. Only tokens that
    the cache does not hold yet are run.
    """
    return model.prefill(input_ids, tier_cache, **kwargs)
