"""The one error of the commands: its sentence is printed as it is and says what to change."""


class StackError(Exception):
    """The stack, or the run on it, cannot go on."""
