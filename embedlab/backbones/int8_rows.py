"""Weights in a byte each: every row of a matrix as integers and one scale; read back as fp32.

A folder has `int8_rows.safetensors` in the place of `model.safetensors`: a matrix NAME as int8 ``[rows, columns]`` with
``NAME::scale`` fp32 ``[rows, 1]``, everything else as it is.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedlab.errors import UserError
from embedlab.files import ordinary_mode

FILE = "int8_rows.safetensors"
_SCALE = "::scale"
_MOST = 127


def in_int8(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as integers and scales: each row by its largest value, so an error is at most half of its 127th part."""
    stored: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.dim() != 2 or not value.is_floating_point():
            stored[name] = value.contiguous()
            continue
        rows = value.float()
        scale = rows.abs().amax(1, keepdim=True) / _MOST
        stored[name] = (rows / scale.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        stored[name + _SCALE] = scale
    return stored


def from_int8(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that `in_int8` stored, to its error.

    Raises:
        ValueError: integers without their scales, or scales of another shape.
    """
    state = {name: value for name, value in stored.items() if not name.endswith(_SCALE)}
    for name, value in state.items():
        if value.dtype != torch.int8:
            continue
        scale = stored.get(name + _SCALE)
        if scale is None or scale.shape != (len(value), 1):
            raise ValueError(f"{name} has no scale for each row")
        state[name] = value.float() * scale
    return state


def write_int8(folder: Path) -> None:
    """Put `FILE` in the place of a folder's `model.safetensors`."""
    plain = folder / "model.safetensors"
    save_file(in_int8(load_file(plain)), folder / FILE, metadata={"format": "pt"})
    ordinary_mode(folder / FILE)
    plain.unlink()


def read_int8(folder: Path) -> dict[str, Tensor] | None:
    """The weights of a folder that has them in this form; None where it has not.

    Raises:
        UserError: the file is not whole.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return from_int8(load_file(file))
    except ValueError as error:
        raise UserError(str(error), file=file, fix="another copy of the model") from error
