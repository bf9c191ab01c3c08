"""The label quality of a trained teacher's dataset, as tables."""

from __future__ import annotations

from rich.table import Column, Table
from rich.text import Text

from services.cli.responses import LabelQualityResponse, RowReferenceResponse
from services.cli.terminal import Console


def show_label_quality(found: LabelQualityResponse, *, limit: int) -> None:
    """Print the counts, and the first entries of each list."""
    console = Console(highlight=False, markup=False)
    for name, head in found["heads"].items():
        console.print(
            f"Head {name}: {head['suspects']:,} likely wrong labels among {head['out_of_fold_texts']:,} training "
            f"texts (out-of-fold baseline) and {head['model_texts']:,} held-out texts (trained model)",
            soft_wrap=True,
        )
    if found["suspects"]:
        columns = ("head", "row", "given", "suggested", "score", Column("text", overflow="fold"))
        table = Table(*columns)
        for entry in found["suspects"][:limit]:
            table.add_row(
                entry["head"],
                f"{entry['split']} {entry['line']}",
                Text(", ".join(entry["given"])),
                Text(", ".join(entry["suggested"])),
                f"{entry['score']:.3f}",
                Text(entry["text"]),
            )
        console.print(table)
    console.print(f"Texts that occur in several splits: {found['num_duplicates']:,}")
    for duplicate in found["duplicates"][:limit]:
        console.print(f"  {_rows(duplicate['rows'])}: {duplicate['text']}", soft_wrap=True)
    console.print(f"Equal texts with different labels: {found['num_contradictions']:,}")
    for contradiction in found["contradictions"][:limit]:
        labels = " / ".join(", ".join(each) for each in contradiction["labels"])
        where = _rows(contradiction["rows"])
        console.print(f"  {where}: {labels}: {contradiction['text']}", soft_wrap=True)


def _rows(rows: list[RowReferenceResponse]) -> str:
    return ", ".join(f"{row['split']} {row['line']}" for row in rows)
