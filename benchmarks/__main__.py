"""``python -m benchmarks``: run benchmarks, print the table, write JSON, table and plot."""

from .run import main

if __name__ == "__main__":
    raise SystemExit(main())
