"""How a request's plain steps travel from the scheduler to its ``meta_info``.

SGLang carries a fixed list of fields through the detokenizer to the HTTP server's process. The count of verify steps is
one of them, and the count of plain steps travels on its back. Nothing but the standard library: the detokenizer
imports this to read it.
"""

from __future__ import annotations


class VerifySteps(int):
    """A request's verify steps, and beside them its plain ones.

    Attributes:
        plain_steps: Plain steps that gave the request a token.
    """

    plain_steps: int

    def __new__(cls, verify_steps: int, plain_steps: int = 0) -> VerifySteps:
        made = super().__new__(cls, verify_steps)
        made.plain_steps = plain_steps
        return made
