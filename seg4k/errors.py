"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """A mistake of the user: the message says what is wrong, where, and how to fix it.

    The command line prints the message without a traceback and exits with status 2.
    """
