"""The errors that a user can fix."""


class UserError(ValueError):
    """Says what cannot be done and how to fix it. Scripts print it and exit with status 2."""


class LocalError(UserError):
    """A UserError that one process of several may meet alone, so that it prints it itself."""
