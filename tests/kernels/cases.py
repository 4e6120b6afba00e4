"""Random problems of decode attention and their solution in float64, for CPU and GPU tests."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

from tierkv.attention import reference
from tierkv.codecs import CODECS, RAW, encoded_bytes
from tierkv.kernels import decode
from tierkv.kernels.decode_blocks import MIN_SPLIT_TOKENS
from tierkv.kernels.encoded import EncodedKV
from tierkv.kernels.merge import Partials, merge
from tierkv.page import Geometry
from tierkv.tiers.arena import Arena

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Largest error of an output, ``|out - exact| / |exact|`` over the whole tensor. The 16-bit types
round the softmax weights and the output once each: half of 2^-10 and of 2^-7."""

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ENCODED = [
    ("int8", Geometry(1, 2, 128, 128, BF16, 32), 4),
    ("int8-channel", Geometry(1, 2, 64, 64, F16, 64), 7),
    ("int4", Geometry(1, 2, 128, 64, BF16, 32), 16),
    ("int4", Geometry(1, 1, 40, 24, F16, 16), 1),
    ("int8-channel", Geometry(1, 1, 48, 64, F32, 32), 3),
    ("fp8", Geometry(1, 2, 128, 72, BF16, 32), 4),
]
"""Codec, pages and group: all groupings and element types, both widths, dims that are padded."""

LSE_TOLERANCE = 5e-4
"""Largest absolute error of a log-sum-exp."""


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: the pages of every sequence are dealt to `launches` launches in order.

    If `per_head`, each KV head sees its own number of tokens, in frames of its own.
    """

    dtype: torch.dtype = torch.bfloat16
    k_dim: int = 128
    v_dim: int = 128
    group: int = 4
    kv_heads: int = 2
    batch: int = 2
    page_tokens: int = 32
    pages: int = 9
    launches: int = 1
    splits: int | None = 3
    padding: bool = False
    softcap: float | None = None
    sinks: bool = False
    per_head: bool = False
    seed: int = 0


def check(case: Case, device: torch.device) -> None:
    """Run a case on `device` and compare with float64."""
    rng = random.Random(case.seed)
    torch.manual_seed(case.seed)
    geometry = Geometry(
        1, case.kv_heads, case.k_dim, case.v_dim, case.dtype, page_tokens=case.page_tokens
    )
    tokens, heads = case.pages * case.page_tokens, case.kv_heads * case.group

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(case.dtype)

    query = 2 * normal(case.batch, case.kv_heads, case.group, case.k_dim)
    k = normal(case.batch, case.kv_heads, tokens, case.k_dim)
    v = normal(case.batch, case.kv_heads, tokens, case.v_dim)
    near_end = max(0, tokens - 2 * case.page_tokens)
    each = (case.batch, case.kv_heads if case.per_head else 1)
    lengths = torch.tensor(
        [[rng.randint(near_end, tokens) for _ in range(each[1])] for _ in range(each[0])]
    )
    lengths[rng.randrange(each[0]), rng.randrange(each[1])] = rng.randint(1, tokens)
    hidden = torch.zeros(case.batch, dtype=torch.int64)
    if case.padding:
        hidden = torch.tensor([rng.randint(0, int(length)) for length in lengths[:, 0]])
        hidden[rng.randrange(case.batch)] = 0

    # A launch may become three, and by default none makes more parts than its tokens pay for.
    parts = case.splits or max(1, tokens // MIN_SPLIT_TOKENS)
    partials = Partials.allocate(3 * case.launches * parts, case.batch, heads, case.v_dim, device)
    partials.out.fill_(float("nan"))
    partials.lse.fill_(float("nan"))
    cuts = sorted(rng.sample(range(1, case.pages), case.launches - 1))
    slot = 0
    for start, stop in zip([0, *cuts], [*cuts, case.pages], strict=True):
        here = slice(start * case.page_tokens, stop * case.page_tokens)
        seen = (lengths - here.start).clamp(0, here.stop - here.start)
        rows = slice(0, case.batch)
        if case.batch > 1 and rng.random() < 0.5:  # this launch serves some sequences only
            first = rng.randrange(case.batch)
            rows = slice(first, rng.randint(first + 1, case.batch))
        for others in (slice(0, rows.start), slice(rows.stop, case.batch)):
            if others.start < others.stop:  # what it leaves out comes in another
                slot = _launch(
                    case, geometry, rng, query, k[others, :, here], v[others, :, here],
                    seen[others], hidden[others], others, here.start, partials, slot,
                )  # fmt: skip
        slot = _launch(
            case, geometry, rng, query, k[rows, :, here], v[rows, :, here], seen[rows],
            hidden[rows], rows, here.start, partials, slot,
        )  # fmt: skip

    out = torch.full((case.batch, heads, case.v_dim), float("nan"), device=device)
    out = out.to(case.dtype)
    lse = torch.full((case.batch, heads), float("nan"), device=device)
    sinks = torch.randn(heads, device=device) if case.sinks else None
    merge(partials, slot, out, lse=lse, sinks=sinks)

    positions = torch.arange(tokens)
    visible = (positions < lengths[..., None]) & (positions >= hidden[:, None, None])
    scale = case.k_dim**-0.5
    exact = reference.attend(
        query.double(), k.double(), v.double(), scale=scale, softcap=case.softcap,
        mask=visible[:, :, None].to(device),
    )  # fmt: skip
    want, want_lse = exact.out.flatten(1, 2), exact.lse.flatten(1, 2)
    if sinks is not None:
        want = want * torch.sigmoid(want_lse - sinks).unsqueeze(-1)
    assert bool(torch.isfinite(out).all()), case
    error = float((out.double() - want).norm() / want.norm().clamp_min(1e-30))
    assert error <= TOLERANCES[case.dtype], (error, case)
    nothing = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, nothing), case
    assert bool((out[nothing] == 0).all()), case
    gap = (lse.double() - want_lse)[~nothing].abs()
    assert not gap.numel() or float(gap.max()) <= LSE_TOLERANCE, (float(gap.max()), case)


def _launch(
    case: Case,
    geometry: Geometry,
    rng: random.Random,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    hidden: torch.Tensor,
    rows: slice,
    position: int,
    partials: Partials,
    slot: int,
) -> int:
    """Store K and V in an arena or as raw frames, everything else NaN, and attend to them."""
    device, count, size = query.device, k.shape[0], case.page_tokens
    pages = k.shape[2] // size
    spare = rng.randint(0, 3)
    total = count * pages + spare
    if rng.random() < 0.5:
        arena = Arena.allocate(geometry, total, device)[0]
        k_frames, v_frames = arena.k_frames, arena.v_frames
        arena.k.fill_(float("nan"))
        arena.v.fill_(float("nan"))
    else:
        raw = torch.full((total, geometry.frame_bytes), 255, dtype=torch.uint8, device=device)
        k_frames, v_frames = RAW.decode(geometry, raw)
    arguments: dict[str, object] = {}
    heads = case.kv_heads if case.per_head else 1
    if case.per_head or rng.random() < 0.6:
        dealt = [rng.sample(range(total), count * pages) for _ in range(heads)]
        frames = torch.tensor(dealt).view(heads, count, pages).transpose(0, 1)
        wide = torch.full((count, heads, pages + 2), 1 << 30)  # a row of a longer table
        wide[..., :pages] = frames
        wide = wide.to(rng.choice([torch.int32, torch.int64])).to(device)
        arguments["table"] = wide[..., :pages] if case.per_head else wide[:, 0, :pages]
    else:
        frames = (spare + torch.arange(count * pages)).view(count, 1, pages)
        arguments.update(first_frame=spare, row_frames=pages)
    for row, head in itertools.product(range(count), range(case.kv_heads)):
        mine = 0 if heads == 1 else head
        token = torch.arange(int(seen[row, mine]))
        where = (head, frames[row, mine, token // size].to(device), (token % size).to(device))
        k_frames[where] = k[row, head, : len(token)]
        v_frames[where] = v[row, head, : len(token)]
    if count == 1 and heads == 1 and rng.random() < 0.5:
        arguments["tokens"] = int(seen[0, 0])
    else:
        arguments["tokens"] = (seen if case.per_head else seen[:, 0]).int().to(device)
    if case.padding:
        arguments.update(first_visible=hidden.int().to(device), position=position)
    return decode.attend(
        query.flatten(1, 2), decode.PagedKV(k_frames, v_frames), partials, slot=slot, rows=rows,
        scale=case.k_dim**-0.5, softcap=case.softcap, splits=case.splits, **arguments,
    )  # fmt: skip


def check_encoded(
    codec: str, geometry: Geometry, group: int, seed: int, device: torch.device
) -> None:
    """Attend to encoded pages, and to what they decode to: the same bits, other pages poisoned."""
    rng, heads = random.Random(f"{codec} {seed}"), geometry.kv_heads
    torch.manual_seed(seed)
    layout = CODECS[codec].layout(geometry)
    assert layout is not None
    batch, pages, size = rng.randint(1, 3), rng.randint(2, 6), geometry.page_tokens
    total, used = batch * pages + 2, batch * pages
    shape = (heads, used, size)
    k, v = (torch.randn(*shape, dim).to(geometry.dtype) for dim in (geometry.k_dim, geometry.v_dim))
    frame_bytes = -(-encoded_bytes(CODECS[codec], geometry) // 64) * 64 + 64
    made = torch.full((used, frame_bytes), 255, dtype=torch.uint8)
    CODECS[codec].encode(geometry, k, v, made)
    order = torch.randperm(total)[:used]
    frames = torch.full((total, frame_bytes), 255, dtype=torch.uint8)
    frames[order] = made
    arena = Arena.allocate(geometry, total, device)[0]
    arena.k.fill_(float("nan"))
    arena.v.fill_(float("nan"))
    for into, decoded in zip(
        (arena.k_frames, arena.v_frames), CODECS[codec].decode(geometry, made), strict=True
    ):
        into[:, order.to(device)] = decoded.to(device)
    query = torch.randn(batch, heads * group, geometry.k_dim).to(geometry.dtype).to(device)
    lengths = [rng.randint(1, pages * size) for _ in range(batch)]
    hidden = [rng.randint(0, length) for length in lengths]
    splits = rng.randint(1, 4)
    arguments = {
        "slot": 0, "splits": splits, "scale": geometry.k_dim**-0.5,
        "table": order.view(batch, pages).to(rng.choice([torch.int32, torch.int64])).to(device),
        "tokens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "softcap": rng.choice([None, 5.0]),
    }  # fmt: skip
    if rng.random() < 0.5:
        arguments["first_visible"] = torch.tensor(hidden, dtype=torch.int32, device=device)
    found = []
    for source in (
        EncodedKV(layout, heads, frames.to(device)),
        decode.PagedKV(arena.k_frames, arena.v_frames),
    ):
        partials = Partials.allocate(splits, batch, heads * group, geometry.v_dim, device)
        decode.attend(query, source, partials, **arguments)
        out = torch.empty(
            (batch, heads * group, geometry.v_dim), dtype=geometry.dtype, device=device
        )
        lse = torch.empty((batch, heads * group), device=device)
        merge(partials, splits, out, lse=lse)
        found.append((out, lse))
    assert bool(torch.isfinite(found[0][0]).all())
    for encoded, raw in zip(*found, strict=True):
        assert torch.equal(encoded, raw)
