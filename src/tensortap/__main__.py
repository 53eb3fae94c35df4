"""`python -m tensortap` is the command `tensortap`."""

from tensortap.cli import main

if __name__ == "__main__":
    main()
