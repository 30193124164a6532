"""``python -m normmatters`` is ``normmatters``."""

from normmatters.cli import main

if __name__ == "__main__":
    main()
