"""A model's decode step as a CUDA graph: captured once, replayed for every token.

Nothing in a step needs the caller's thread: lengths and slots are read from device memory, and
another thread brings what a step finds on disk (`tierkv.paging.faults`). Between replays the host
does what happens once a page: sealing, writing through, new blocks.
"""

from __future__ import annotations

import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import torch

from tierkv.attention.captured import CapturedLookups
from tierkv.config import Config
from tierkv.errors import CaptureError, KernelsUnavailableError, UnsupportedModelError
from tierkv.hf.attach import cache_argument
from tierkv.hf.attention import padding_of
from tierkv.hf.cache import TierCache
from tierkv.hf.geometry import stores_latents
from tierkv.hf.step import running
from tierkv.hf.upcoming import Upcoming
from tierkv.kernels import decode
from tierkv.kernels.build import available
from tierkv.paging.turns import activate

WARMUPS = 1
"""Eager runs of a step before it is captured: libraries set themselves up."""
MAX_DIFFERENCE = 0.25
"""Relative difference of logits up to which a replay counts as the model's own step: rounding in 16
bits makes 0.05 on random weights, one wrong page in 64 makes 0.8."""
_CAPTURE_ERRORS = (
    RuntimeError, TypeError, ValueError, UnsupportedModelError, KernelsUnavailableError,
)  # fmt: skip
MIN_ROOM = 4096
"""Tokens that can be replayed at least, also beyond what the model was trained for."""


class DecodeGraph:
    """Decode steps of sequences that run together on one GPU.

    Attributes:
        replays: steps replayed so far.
        output: what the model returned when the step was captured; its logits are the last step's.

    Args:
        hf_model: the wrapped model.
        tier_cache: what it has read so far; appends must go through `step` from now on, or
            through the model itself, in any order.
        max_tokens: length up to which the captured step can be replayed.
        look_ahead: layers ahead for which lookups are foreseen, where layers select; 0 for none.
        compiled: run the model's own layers through `torch.compile`, which takes a while once.
        padding: ``[batch]`` int32, tokens hidden before each sequence; None for none.
        proves: run the first step also through the model itself and compare the logits. A model
            whose step needs more than tokens and positions differs, and is not replayed.
    """

    def __init__(
        self,
        hf_model: Any,
        tier_cache: TierCache,
        max_tokens: int,
        *,
        look_ahead: int = 0,
        compiled: bool = False,
        padding: torch.Tensor | None = None,
        proves: bool = False,
    ):
        self.hf_model, self.padding = hf_model, padding
        self._cache = weakref.ref(tier_cache)  # no cycle: it keeps the graph, and is freed at once
        self._forward = hf_model.forward  # before anyone wraps it
        self._compiled = torch.compile(self._forward, fullgraph=True) if compiled else None
        self.replays = 0
        manager = tier_cache.live_manager()
        self.upcoming: Upcoming | None = None
        if manager.selective is not None:
            first = manager.selective.spec.dense_layers
            self.upcoming = Upcoming.of(hf_model, look_ahead, first)
        pages = -(-max_tokens // manager.geometry.page_tokens) + 2
        with torch.inference_mode(False):
            self.lookups = CapturedLookups(manager, tier_cache.sequences, pages, padding)
            rows = max(tier_cache.sequences.batch, 1)
            self.ids = torch.zeros((rows, 1), dtype=torch.long, device=manager.device)
        self._graph: Any = None
        self._waits = False  # whether the graph can wait for pages on disk
        self._failed, self._proves = "", proves
        self._logits: torch.Tensor | None = None
        self.output: Any = None

    @property
    def tier_cache(self) -> TierCache:
        """The cache whose steps these are."""
        tier_cache = self._cache()
        assert tier_cache is not None, "the cache of this graph is gone"
        return tier_cache

    @property
    def captured(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    def serves(self, rows: int, padding: torch.Tensor | None) -> bool:
        """Whether steps are of so many sequences, so padded."""
        if padding is None or self.padding is None:
            return len(self.ids) == rows and padding is self.padding
        return len(self.ids) == rows and torch.equal(padding, self.padding)

    def obstacle(self) -> str:
        """Say why the next step cannot be a replay; empty if it can. It is the cache's turn now."""
        activate(self.tier_cache.live_manager(), self.lookups.sequences)
        if self.tier_cache.tiered_in_part:
            return "the model has layers with sliding windows or recurrent state"
        return self._failed or self.lookups.obstacle()

    @torch.inference_mode(False)  # what is kept from step to step may be written in any mode
    @torch.no_grad()
    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Append tokens and return their logits, ``[batch, 1, vocab]``, valid until the next step.

        token: ``[batch, 1]`` on the device. The caller has asked `obstacle`.

        Raises:
            HotBudgetError, WarmBudgetError, DiskBudgetError: no room; nothing was appended.
            ColdReadError, PageFaultError: a page could not be read from disk; nothing was appended,
                and the step may be repeated.
            CaptureError: the model needs the host in a step, or more than tokens and positions;
                nothing was appended, and `obstacle` says so from now on.
            TierKVError: the last forward stopped midway; call `rollback` on the cache.
        """
        manager, sequences = self.tier_cache.live_manager(), self.tier_cache.sequences
        self.tier_cache.check_whole()
        manager.begin_token(sequences)
        self.ids.copy_(token)
        self.lookups.begin()
        exact, waits = self.lookups.exact, self.lookups.waits
        if self._graph is None or exact.outgrown or (waits and not self._waits):
            self._graph, self._waits = None, waits
            exact.renew()
            with self.lookups.answered():  # warm-ups ask, too; what they were told ends with them
                self._capture()
        counted = self.lookups.uncounted() if self._proves else nullcontext()
        with self.lookups.answered(), counted:
            self._replay()
        if self._proves:
            return self._prove(token)
        exact.count()
        try:
            manager.end_token(sequences)
        except BaseException:
            self.tier_cache.rollback()
            raise
        assert self._logits is not None
        return self._logits

    def _replay(self) -> None:
        self._graph.replay()
        self.lookups.manager.transfer.replayed()
        self.replays += 1

    def _prove(self, token: torch.Tensor) -> torch.Tensor:
        """Append a token through the model itself, and compare what the replay made of it."""
        assert self._logits is not None
        replayed = self._logits.float()
        more: dict[str, Any] = {cache_argument(self.hf_model): self.tier_cache}
        if self.padding is not None:
            columns = torch.arange(self.tier_cache.get_seq_length() + 1, device=token.device)
            more["attention_mask"] = (columns >= self.padding[:, None]).long()
            more["position_ids"] = self.lookups.numbers.device.position
        own = self._forward(input_ids=token, use_cache=True, return_dict=True, **more).logits
        logits: torch.Tensor = own
        error = float((replayed - logits.float()).norm() / logits.float().norm())
        if not error <= MAX_DIFFERENCE:
            self._failed = f"a replay's logits differ from the model's own by {error:.2g}"
            warnings.warn(f"decoding without a CUDA graph: {self._failed}", stacklevel=4)
        self._proves = False
        return logits

    def _capture(self) -> None:
        """Capture the step; its warm-ups write the token that is to be appended."""
        try:
            with self.lookups.uncounted():
                transfer = self.lookups.manager.transfer
                self._graph, self._logits = transfer.capture(self._run, WARMUPS)
        except _CAPTURE_ERRORS as error:
            reason = str(error).strip().split("\n")[0]
            if self._compiled is None:
                self._failed = f"the model's step cannot be captured ({reason})"
                raise CaptureError(self._failed) from error
            warnings.warn(f"decoding without torch.compile: {reason}", stacklevel=4)
            self._compiled = None
            self._capture()

    def _run(self) -> torch.Tensor:
        self.lookups.start()
        with running(self.hf_model, self.lookups, self.upcoming) as step_cache:
            self.output = (self._compiled or self._forward)(
                input_ids=self.ids,
                position_ids=self.lookups.numbers.device.position,
                use_cache=True,
                return_dict=True,
                **{cache_argument(self.hf_model): step_cache},
            )
        self.lookups.exact.finish()
        logits: torch.Tensor = self.output.logits
        return logits


def decode_graph(
    hf_model: Any,
    tier_cache: TierCache,
    config: Config,
    tokens: int,
    mask: torch.Tensor | None = None,
) -> DecodeGraph | None:
    """Return the decode step of a cache as a CUDA graph, unless it is unwanted or cannot be one.

    The cache holds sequences of `tokens` tokens, or one less, and keeps the graph. If one is asked
    for (`Config.cuda_graph`) and cannot be, a warning says why.

    mask: ``[batch, tokens]``, False where a token is padding; None for one sequence without any.
    """
    if config.cuda_graph is False:
        return None
    hidden, padding = 0, None
    reason = _hindrance(hf_model, tier_cache)
    if not reason:
        manager = tier_cache.live_manager()
        if mask is not None:
            hidden, padding = padding_of(mask.to(manager.device).bool())
        rows = 1 if mask is None else len(mask)
        if hidden and padding is None:
            reason = "tokens are hidden that are no padding on the left"
        elif rows != max(tier_cache.sequences.batch, 1):
            reason = f"{rows} rows go on from a cache of {tier_cache.sequences.batch}"
        elif hidden and manager.selective is not None:
            reason = "selective attention cannot hide padding"
    if reason:
        if config.cuda_graph:
            warnings.warn(f"decoding without a CUDA graph: {reason}", stacklevel=3)
        return None
    padding = padding if hidden else None
    text = hf_model.config.get_text_config(decoder=True)
    if tier_cache.graph is None or not tier_cache.graph.serves(rows, padding):
        most = max(config.max_context or text.max_position_embeddings, tokens + MIN_ROOM)
        tier_cache.graph = DecodeGraph(
            hf_model, tier_cache, most, look_ahead=config.look_ahead, compiled=config.compile,
            padding=padding, proves=config.cuda_graph is None,
        )  # fmt: skip
    graph: DecodeGraph = tier_cache.graph
    return graph


def _hindrance(hf_model: Any, tier_cache: TierCache) -> str:
    """Say why no step of a model over a cache can be captured; empty if some can."""
    manager = tier_cache.manager
    if manager is None or tier_cache.tiered_in_part:
        return "the model has layers with sliding windows or recurrent state"
    if manager.device.type != "cuda":
        return f"the model is on the device {manager.device}, no NVIDIA GPU"
    if hf_model.training:
        return "the model is in training mode"
    if _hooked(hf_model):
        return "the model has hooks, which a replay would not call"
    if stores_latents(hf_model):
        return "the model keeps latents (MLA)"
    if not available():
        return f"it needs the CUDA kernels: {available().reason}"
    heads = hf_model.config.get_text_config(decoder=True).num_attention_heads
    if not decode.supports(manager.geometry, heads, manager.device):
        return f"the kernels do not take {heads} query heads of {manager.geometry}"
    return ""


def _hooked(hf_model: Any) -> bool:
    """Whether someone watches modules of a model, which a replay would not show."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in hf_model.modules())
