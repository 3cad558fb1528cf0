"""The one error that a user causes: it says what is wrong and what to do, and it carries no traceback."""


class TrainerError(Exception):
    """Bad input: `message` says what, where and why in one line; `hint` says what to do next (may be empty)."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
