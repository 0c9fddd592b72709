"""``python -m hpcrun COMMAND``."""

from hpcrun.cli.main import main

if __name__ == "__main__":
    main()
