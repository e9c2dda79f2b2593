"""`python -m tidekv`: the command line."""

from tidekv.engine.cli.main import main

if __name__ == "__main__":
    main()
