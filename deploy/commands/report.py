"""`shoal report`: writes a run's record as a page."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.deploy.base.words import file_name
from shoal.deploy.commands.options import check_writable, examples, start_logging
from shoal.deploy.terminal.plain import say
from shoal.protocol.errors import LocalError


@examples(
    "shoal report  # the run that was last recorded here, as a page in one file",
    "shoal report notes -o notes.html  # the run notes",
    "shoal report 0099d75f --csv notes.csv  # by the beginning of its identifier; every step, for a spreadsheet",
    "shoal report backup/record.jsonl  # a record from elsewhere",
)
def report(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="The run's name, id, folder or record. Default: the newest run here.")
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.html", help="The page to write. Default: shoal-NAME.html in this folder."
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Also write every step and validation to this file.")
    ] = None,
) -> None:
    """Write a run's record as one page in one file."""
    from shoal.deploy.record.found import find_record
    from shoal.deploy.record.html_page import csv_of, render_page
    from shoal.deploy.record.reading import read_record
    from shoal.deploy.record.summary import in_words

    for path in (output, csv):
        if path is not None:
            check_writable(path)
    start_logging(False)
    found = find_record(run)
    record = read_record(found)
    if not record.steps:
        raise LocalError(f"no step is recorded in {found} yet")
    name = record.starts[-1].name if record.starts else found.parent.name
    page = output or Path(f"shoal-{file_name(name)}.html")
    try:
        page.write_text(render_page(record), encoding="utf-8")
        if csv is not None:
            csv.write_text(csv_of(record), encoding="utf-8")
    except OSError as error:
        raise LocalError(f"cannot write {error.filename or page}: {error.strerror or error}") from error
    for line in in_words(record, found):
        say(line)
    say(f"  page         {page.resolve()}" + (f"\n  csv          {csv.resolve()}" if csv is not None else ""))
