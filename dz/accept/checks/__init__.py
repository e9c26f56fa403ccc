"""One file for each check; `dz.accept.check.discover` finds them by their `CHECK`."""
