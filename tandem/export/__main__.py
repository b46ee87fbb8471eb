"""``python -m tandem.export``; see `tandem.export.cli`."""

from tandem.export.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
