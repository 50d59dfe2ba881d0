"""The one exception that means: what the user gave is wrong."""


class InputError(ValueError):
    """Bad input, told in one sentence: what is wrong, where (file, row, column or field path), and what to do.

    The command line prints the sentence and exits with code 2; it never shows a traceback for it.
    """
