"""Checkpoint matrices in the layout of native/gemm.h."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] in panels of 16 rows: values[panel][column][16], the last panel padded with zeros.

    address: of the C struct `Matrix` that describes it; native functions take it as `const Matrix*`.
    """

    values: Tensor
    rows: int
    columns: int
    address: int
