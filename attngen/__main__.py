"""`python -m attngen`: the command line without the installed script."""

from attngen.cli import main

if __name__ == "__main__":
    main()
