"""Queries on the small database of a shop, made from `shop.sql` by each process."""

import sqlite3
from functools import cache
from pathlib import Path

MOST_ROWS = 50
MOST_STEPS = 10_000_000  # of the database's virtual machine, checked every thousand steps
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def sqlite(query: str) -> str:
    """Query the shop's database in SQL; SELECT sql FROM sqlite_master shows its tables.

    Args:
        query: One SELECT statement of SQLite.
    """
    steps = iter(range(MOST_STEPS // 1000))
    database = _database()
    database.set_progress_handler(lambda: next(steps, None) is None, 1000)
    result = database.execute(query)
    rows = result.fetchmany(MOST_ROWS + 1)
    lines = [" | ".join(column[0] for column in result.description or ())]
    lines += (" | ".join(map(str, row)) for row in rows[:MOST_ROWS])
    return "\n".join(lines) + (f"\n(only the first {MOST_ROWS} rows)" if len(rows) > MOST_ROWS else "")


@cache
def _database() -> sqlite3.Connection:
    database = sqlite3.connect(":memory:")
    database.executescript(Path(__file__).with_name("shop.sql").read_text(encoding="utf-8"))
    database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
    return database
