"""`python -m attnlens`, the same as `attnlens`."""

from attnlens.cli import main

if __name__ == "__main__":
    main()
