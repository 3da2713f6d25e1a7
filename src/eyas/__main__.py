"""`python -m eyas` is `eyas`."""

from eyas.cli import main

if __name__ == "__main__":
    main()
