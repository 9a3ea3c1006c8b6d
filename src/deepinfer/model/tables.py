"""Plain text tables and sizes for people."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of equal columns: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def size(num_bytes: float) -> str:
    """Bytes in the unit that fits, powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.2f} GiB"


def count(number: float) -> str:
    """A count with K, M or B for thousands, millions, billions."""
    for unit in ("", " K", " M"):
        if abs(number) < 1000:
            return f"{number:.4g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.2f} B"
