"""Prints a table row by row, as soon as each row is known. Therefore the widths of the columns are fixed."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from shoal.deploy.terminal.plain import wrapped


class Column(NamedTuple):
    heading: str
    width: int
    right: bool = True


class Rows:
    """Prints the headings of `columns`, then rows. Args: last: the heading of a last column, in which text wraps."""

    def __init__(self, console: Console, columns: Sequence[Column], *, last: str = "") -> None:
        self._console = console
        self._columns = columns
        widths = [column.width for column in columns]
        self._gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= console.width else " "
        self._room = console.width - sum(width + 2 for width in widths) - 1
        self._print([column.heading for column in columns], last, style="dim")

    def row(self, *cells: str, last: str = "", style: str = "") -> None:
        """Print a row. A cell that is wider than its column shifts the cells to its right."""
        self._print(cells, last, style=style)

    def _print(self, cells: Sequence[str], last: str, *, style: str) -> None:
        padded = [
            cell.rjust(column.width) if column.right else cell.ljust(column.width)
            for cell, column in zip(cells, self._columns, strict=True)
        ]
        line = self._gap.join(padded)
        if self._room >= 24:  # else the text of the last column goes below the row
            first, *others = wrapped(last, self._room)
            lines = [f"{line}  {first}", *(" " * (len(line) + 2) + more for more in others)]
        else:
            lines = [line, *(wrapped(f"    {last}", self._console.width - 1) if last else ())]
        for each in lines:
            self._console.print(Text(each.rstrip(), style=style), soft_wrap=True)
