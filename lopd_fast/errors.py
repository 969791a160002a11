"""The one exception type for mistakes that the user can mend."""


class UserError(ValueError):
    """A file, a setting or a command that cannot work as given.

    The message is one sentence that names what is wrong and what to do about it; the command line prints it without
    a traceback. Functions on tensors raise plain ``ValueError`` or ``TypeError`` instead.
    """
