"""A table in the terminal: rich's where it is installed and somebody looks, else aligned columns."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print it; the first column is text, the others are numbers."""
    print(title)
    if sys.stdout.isatty() and _rich(columns, rows):
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("  " + "  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def _rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
    return True
