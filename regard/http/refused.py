"""A request that is refused."""


class Refused(Exception):
    """A request that is refused: the status, and the reason in words. `param` is the field that is wrong, `code` what
    clients of OpenAI's API call the reason, `retry_after` the seconds after which it is worth trying again (0: not)."""

    def __init__(
        self, status: int, why: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ):
        super().__init__(why)
        self.status, self.why, self.param, self.code, self.retry_after = status, why, param, code, retry_after
