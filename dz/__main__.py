"""`python -m dz`, from a checkout or an installation."""

from dz.cli.main import run

if __name__ == "__main__":
    run()
