"""The `stillhouse` command: assembles its subcommands."""

from __future__ import annotations

import typer

from services.cli.commands import (
    audit,
    backup,
    datasets,
    demo,
    diagnose,
    doctor,
    gc,
    jobs,
    keys,
    maintenance,
    models,
    plan,
    predict,
    trace,
    up,
)

app = typer.Typer(
    name="stillhouse",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Distil a large language model into a small text classifier, with exact memory plans.",
)
app.command()(up.up)
app.command()(demo.demo)
app.command()(plan.plan)
app.command()(trace.trace)
app.command()(diagnose.diagnose)
app.command()(doctor.doctor)
app.command()(gc.gc)
app.command()(backup.backup)
app.command()(backup.restore)
app.add_typer(datasets.app, name="datasets")
app.add_typer(jobs.app, name="jobs")
app.add_typer(models.app, name="models")
app.command()(predict.predict)
app.command()(audit.audit)
app.add_typer(keys.app, name="keys")
app.add_typer(maintenance.app, name="maintenance")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
