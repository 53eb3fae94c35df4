"""`python -m tensortap` is the command `tensortap`."""

from tensortap.cli.commands import main

if __name__ == "__main__":
    main()
