"""Error of the user's input, printed without a traceback."""


class TrainerError(Exception):
    """Bad input: `message` is one line with what, where and why; `hint` is the next step, or ""."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
