"""From estimated mass to the pages of a lookup.

Everything stays on the device, without a host synchronisation, so that a step that selects can
be captured as a CUDA graph. The rules (ties, order, filling) are those a kernel has to keep too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tierkv.errors import ConfigError


class Chosen(NamedTuple):
    """Pages to look up.

    Attributes:
        pages: ``[batch, kv_heads, budget_pages]``, int64: page indices in ascending order (that
            of the sequence, not of the mass), then -1 in the entries that are not used.
        counts: ``[batch, kv_heads]``, int64: entries used.
    """

    pages: torch.Tensor
    counts: torch.Tensor


def choose(
    mass: torch.Tensor,
    budget_pages: int,
    *,
    candidates: torch.Tensor,
    mass_target: float | None = None,
) -> Chosen:
    """Choose the pages of largest mass per KV head; of equal ones those of lower index.

    Args:
        mass: ``[batch, kv_heads, pages]``, from `page_mass`. A page of mass 0 (or NaN) is never
            chosen, so a budget for all pages chooses all that were scored.
        budget_pages: most pages per KV head.
        candidates: boolean, broadcastable to `mass`: which pages may be chosen. Sinks and recent
            pages, which are read anyway, are not among them.
        mass_target: stop at the fewest pages that hold this share of all the candidates' mass,
            above 0 up to 1. None: fill the budget.

    Raises:
        ConfigError: the budget is negative or the target is no share.
    """
    if budget_pages < 0:
        raise ConfigError(f"budget_pages must be 0 or more, got {budget_pages}")
    if mass_target is not None and not 0 < mass_target <= 1:
        raise ConfigError(f"mass_target must be above 0 and at most 1, got {mass_target}")
    pages = mass.shape[-1]
    worth = torch.where(candidates & (mass > 0), mass, 0.0)
    values, indices = worth.sort(dim=-1, descending=True, stable=True)
    taken = (values > 0) & (torch.arange(pages, device=mass.device) < budget_pages)
    if mass_target is not None:
        reached = values.double().cumsum(dim=-1)
        before = torch.nn.functional.pad(reached, (1, 0))[..., :-1]
        taken &= before < mass_target * reached[..., -1:]
    ascending = torch.where(taken, indices, pages).sort(dim=-1).values[..., :budget_pages]
    ascending = ascending.masked_fill(ascending == pages, -1)
    unused = budget_pages - ascending.shape[-1]
    return Chosen(torch.nn.functional.pad(ascending, (0, unused), value=-1), taken.sum(dim=-1))
