"""How the blocks of decode attention are built, and how many there are."""

from __future__ import annotations

from typing import NamedTuple

from tierkv.kernels.build import BLOCK_RESERVE
from tierkv.units import round_up

TILE = 16
"""Tokens a warp takes at once."""

MIN_SPLIT_TOKENS = 128
"""Tokens for which a further block pays: four warps, two tiles each."""

EFFICIENT = 0.95
"""Share of the device's block places in use that is good enough."""


class Layout(NamedTuple):
    """How a block is built: warps, tiles a warp holds, and shared memory in bytes."""

    warps: int
    stages: int
    shared_bytes: int


def choose_layout(
    k_dim: int,
    v_dim: int,
    itemsize: int,
    group: int,
    *,
    block_limit: int,
    processor_limit: int,
    tile_bytes: int = 0,
) -> Layout:
    """Return the layout that keeps most bytes in flight: two blocks of three or four stages on a
    multiprocessor if they fit, else one block. Encoded tiles are small and take time to decode:
    more warps come before more stages then.

    Args:
        block_limit: largest shared memory of a block, in bytes.
        processor_limit: shared memory of a multiprocessor, in bytes.
        tile_bytes: of an encoded tile; 0 where pages are raw.
    """
    half = min(block_limit, processor_limit // 2 - BLOCK_RESERVE)
    third = min(block_limit, processor_limit // 3 - BLOCK_RESERVE)
    for warps, stages, limit in (
        *(((4, 3, third), (4, 2, third)) if tile_bytes else ()),
        (4, 4, half),
        (4, 3, half),
        (4, 4, block_limit),
        (4, 3, block_limit),
        (4, 2, block_limit),
        (2, 3, block_limit),
        (2, 2, block_limit),
        (1, 2, block_limit),
    ):
        needed = shared_bytes(k_dim, v_dim, itemsize, group, warps, stages, tile_bytes)
        if needed <= limit:
            return Layout(warps, stages, needed)
    raise ValueError(
        f"head dims {k_dim} and {v_dim} of {itemsize} bytes with {group} query heads per KV head "
        f"need {needed} bytes of shared memory, a block has {block_limit}"
    )


def shared_bytes(
    k_dim: int, v_dim: int, itemsize: int, group: int, warps: int, stages: int, tile_bytes: int = 0
) -> int:
    """Return the shared memory of a block in bytes; ``cuda/decode.cu`` checks it."""
    if itemsize == 4:
        width, query = k_dim + v_dim + 8, group * k_dim + warps * TILE * round_up(group, 4)
    else:
        width, query = round_up(k_dim, 16) + round_up(v_dim, 16) + 16, 0
    raw = TILE * width * itemsize
    tiles = warps * (stages * tile_bytes + raw if tile_bytes else stages * raw)
    return max(query * 4 + tiles, warps * group * (v_dim + 2) * 4)


def choose_splits(tokens: int, pairs: int, blocks_at_once: int) -> int:
    """Return into how many splits the tokens of a sequence go.

    As few as fill the device: the blocks of all `pairs` of a sequence and a KV head should come to
    whole rounds of `blocks_at_once`, and no split is so small that starting it costs more.
    """
    best, best_use = 1, 0.0
    for rounds in range(1, 9):
        splits = max(1, rounds * blocks_at_once // pairs)
        blocks = splits * pairs
        use = blocks / round_up(blocks, blocks_at_once)
        if use > best_use:
            best, best_use = splits, use
        if best_use >= EFFICIENT:
            break
    return min(best, max(1, tokens // MIN_SPLIT_TOKENS))
