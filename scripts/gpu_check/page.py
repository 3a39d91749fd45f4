"""Make a page of tables of what the parts have found."""

from typing import Any

Record = dict[str, Any]


def write_page(records: dict[str, Record]) -> str:
    """Return a Markdown page: a section for each part, a table for facts with the same columns."""
    blocks = ["# gptmini on a GPU"]
    for name, record in records.items():
        blocks += [f"## {name}", _describe_outcome(record), *_make_tables(record["found"])]
        if "output" in record:
            blocks.append("\n".join(["```text", *record["output"], "```"]))
    return "\n\n".join(blocks) + "\n"


def _describe_outcome(record: Record) -> str:
    if record["ok"]:
        return f"In {record['seconds']} s."
    return f"**Failed**: ended {record['ended']}."


def _make_tables(found: Record) -> list[str]:
    """Make a table of the plain facts, and one of each run of rows with the same columns."""
    plain = {name: value for name, value in found.items() if not isinstance(value, dict)}
    rows = {name: value for name, value in found.items() if isinstance(value, dict)}
    tables: list[list[str]] = []
    if plain:
        lines = [f"| {_escape(name)} | {format_value(value)} |" for name, value in plain.items()]
        tables.append(["| | |", "|---|---|", *lines])
    columns: list[str] = []
    for name, row in rows.items():
        if list(row) != columns:
            columns = list(row)
            rule = "|---" * (len(columns) + 1) + "|"
            tables.append([f"| | {' | '.join(columns)} |", rule])
        cells = [format_value(row[column]) for column in columns]
        tables[-1].append(f"| {_escape(name)} | {' | '.join(cells)} |")
    return ["\n".join(table) for table in tables]


def format_value(value: Any) -> str:
    """Format a fact for a table: numbers short, large ones with commas."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or "none"
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    if isinstance(value, int | float):
        return f"{value:,.0f}"
    return _escape(str(value))


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
