"""From row numbers to padded token tensors, by fixed-shape tensor operations on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embedlab.data.mix import MixedTable
from embedlab.data.table import FieldView, PackedTable, Table
from embedlab.kernels.available import has_triton


class ResidentTable:
    """The tokens of a table on a device.

    On a CPU this is the memory-mapped file itself; elsewhere a copy, at two bytes a token for vocabularies up
    to 65,536. `gather` waits for nothing and has output shapes that its arguments give, so it can be compiled
    and captured in a CUDA graph.

    Args:
        table: opened.
        device: where the tokens live and `gather` runs.
    """

    def __init__(self, table: Table | MixedTable, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._numbers = {
            name: torch.from_numpy(values).to(self.device) for name, values in table.numbers.items()
        }
        self._fields: dict[str, _Packed | _Ragged] = {
            name: _Packed(table, view, self.device)
            if isinstance(table, PackedTable)
            else _Ragged(view, self.device)
            for name, view in table.fields.items()
        }

    def gather(
        self, rows: Tensor, lengths: Mapping[str, int], token_budgets: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """The batch of these rows.

        Args:
            rows: int64 [B], on the device.
            lengths: field -> L, of the fields that these rows have: at least the longest row of the batch in this field
                (longer rows are cut).
            token_budgets: field -> C, at least the true tokens of the batch in this field; None: not to be told.

        Returns:
            ``rows`` [B], ``hash`` int64 [B] (of the first field's text), and for each field ``input_ids`` and
            ``attention_mask`` int64 [B, L], padded on the right, and its ``hash`` [B]: equal texts have equal
            hashes, in every field. With `token_budgets` the field has its ``token_budget`` C as well; of packed
            rows, which have no padding, ``full`` is True.
            Numeric columns of the kind of data stand by their names, float32 or int64 [B].
        """
        batch: dict[str, Any] = {
            name: field.gather(rows, lengths[name]) for name, field in self._fields.items() if name in lengths
        }
        for name, budget in (token_budgets or {}).items():
            batch[name]["token_budget"] = budget
        numbers = {name: values[rows] for name, values in self._numbers.items()}
        return {"rows": rows, "hash": next(iter(batch.values()))["hash"], **batch, **numbers}


class _Ragged:
    def __init__(self, view: FieldView, device: torch.device) -> None:
        self.ids, self.bits = _ids(view, device)
        self.offsets = torch.from_numpy(view.offsets).to(device)
        self.hashes = torch.from_numpy(view.hashes.view("int64")).to(device)
        self.pad_id = view.pad_id

    def gather(self, rows: Tensor, length: int) -> dict[str, Tensor]:
        gather = _ragged_rows
        if rows.is_cuda and has_triton():
            from embedlab.kernels.packing_triton import gather_ragged as gather
        tensors = gather(self.ids, self.offsets, self.hashes, rows, length, self.bits, self.pad_id)
        return dict(zip(("input_ids", "attention_mask", "hash"), tensors, strict=True))


def _ragged_rows(
    ids: Tensor, offsets: Tensor, hashes: Tensor, rows: Tensor, length: int, bits: int, pad: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `embedlab.kernels.packing_triton.gather_ragged` does on a card."""
    start, end = offsets[rows].unsqueeze(1), offsets[rows + 1].unsqueeze(1)
    position = start + torch.arange(length, device=rows.device)
    real = position < end
    tokens = ids[position.clamp(max=len(ids) - 1)].long() & bits
    return torch.where(real, tokens, pad), real.long(), hashes[rows]


class _Packed:
    def __init__(self, table: PackedTable, view: FieldView, device: torch.device) -> None:
        self.ids, self.bits = _ids(view, device)
        self.width = table.width
        self.first = self.last = None
        if table.frame is not None:
            self.first, self.last = (torch.full((1, 1), token, device=device) for token in table.frame)

    def gather(self, rows: Tensor, length: int) -> dict[str, Any]:
        place = rows.unsqueeze(1) * self.width + torch.arange(self.width, device=rows.device)
        ids = self.ids[place].long() & self.bits
        if self.first is not None and self.last is not None:
            column = (len(rows), 1)
            ids = torch.cat([self.first.expand(column), ids, self.last.expand(column)], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "hash": rows, "full": True}


def _ids(view: FieldView, device: torch.device) -> tuple[Tensor, int]:
    """The flat ids as signed integers, whose indexing every device has, and the mask that undoes the sign."""
    size = view.ids.dtype.itemsize
    return torch.from_numpy(view.ids.view(f"int{8 * size}")).to(device), 2 ** (8 * size) - 1
