"""The one kind of error that users see: a single line that says what, where and how to mend it."""


class UserError(ValueError):
    """Bad input, or a machine that cannot do what was asked.

    Its text is one line that names what is wrong, where (file, line, sample) and the remedy. Commands print it without
    a traceback and exit with 2; steps record it in `exit.json`.
    """
