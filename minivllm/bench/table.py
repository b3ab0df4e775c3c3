"""A table in the terminal: rich's if it is installed and output is a terminal, else aligned columns."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> None:
    """Print it; the columns ``left`` are text, the others are numbers."""
    print(title)
    if sys.stdout.isatty() and _rich(columns, rows, left):
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
    return True
