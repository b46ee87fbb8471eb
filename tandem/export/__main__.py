"""``python -m tandem.export``; see `tandem.export.program`."""

from tandem.export.program import main

if __name__ == "__main__":
    raise SystemExit(main())
