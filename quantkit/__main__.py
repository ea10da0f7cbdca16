"""``python -m quantkit``."""

from quantkit.cli.app import app

app(prog_name="quantkit")
