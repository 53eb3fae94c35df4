"""The version of tensortap: the build, `tt.__version__` and `tensortap --version` read it here."""

__version__ = "0.1.0.dev0"
