"""RichModelSummary, a callback that prints a module's layers and parameters as a Rich table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leyden.callbacks.model_summary import ModelSummary, Summary
from leyden.core.errors import ConfigurationError, needs

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from leyden.trainer.trainer import Trainer

NUMBERS = ("Params", "Trainable")
SIZES = ("In sizes", "Out sizes")


class RichModelSummary(ModelSummary):
    """Prints ModelSummary's table in color at the start of a fit; without a terminal, the plain table.

    With a RichProgressBar, `Trainer(enable_model_summary=True)` adds this callback in place of ModelSummary.

    Args:
        max_depth: levels of submodules to show: 1 for direct submodules, 0 for the totals only, -1 for all.
        **summarize_kwargs: arguments of `rich.table.Table`, such as `header_style="bold green"`.

    Raises:
        MissingExtraError: if `rich` is not installed.
        ConfigurationError: if `max_depth` is neither -1 nor a whole number from 0, or Rich rejects an argument.

    Example:
        >>> callback = RichModelSummary(max_depth=2, header_style="bold green")
        >>> # Trainer(callbacks=[callback])
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)
        self._table_arguments = {"header_style": "bold magenta", **summarize_kwargs}
        with needs("rich", "rich", type(self).__name__):
            from rich.console import Console
            from rich.errors import MissingStyle
        console = Console()
        try:
            self._table()
            for name, value in self._table_arguments.items():
                if name.endswith("style") and value is not None:
                    console.get_style(value)
        except (TypeError, MissingStyle) as error:
            raise ConfigurationError(
                f"{type(self).__name__}(**{summarize_kwargs!r}): rich.table.Table rejects this ({error})."
            ) from None

    def show(self, trainer: Trainer, summary: Summary) -> None:
        from rich.console import Console

        console = Console()
        if console.is_jupyter or console.file.isatty():
            self._print(console, summary)
        else:
            super().show(trainer, summary)

    def _table(self) -> Table:
        from rich.table import Table

        return Table(**self._table_arguments)

    def _print(self, console: Console, summary: Summary) -> None:
        from rich.table import Table

        if summary.layers:
            titles, *rows = map(list, summary.cells())
            table = self._table()
            for title in titles:
                table.add_column(
                    title,
                    style="dim" if title == "" else "grey53" if title in SIZES else None,
                    justify="right" if title in NUMBERS else "left",
                    no_wrap=title in NUMBERS,
                    overflow="fold",
                )
            for row in rows:
                table.add_row(*(_plain(cell) for cell in row))
            console.print(table)
        totals = Table.grid(padding=(0, 2))
        for number, name in summary.totals():
            totals.add_row(number, name, style="bold" if name == "parameters in total" else None)
        for remark in summary.remarks():
            console.print(_plain(remark))
        console.print(totals)


def _plain(text: str) -> Any:
    """Returns text without markup. Rich would take a size in brackets for a style."""
    from rich.text import Text

    return Text(text)
