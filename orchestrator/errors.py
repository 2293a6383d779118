"""What can go wrong, sorted by whose fault it is.

    OrchestratorError
    ├── RequestError            the caller's
    │   ├── InvalidArgument     a value outside its range
    │   ├── PromptTooLong       more tokens than a request may hold
    │   ├── TemplateError       the chat template refused the messages
    │   ├── Busy                the queue is full; says when to ask again
    │   ├── SessionBusy         the session is generating a reply
    │   ├── SessionClosed       the session was closed
    │   └── EngineClosed        the engine was closed before or during the request
    ├── ConfigError             the configuration's
    │   └── ModelFileError      a file that cannot be opened as a model
    └── BackendError            llama.cpp's
        ├── PoolFull            no free cell or sequence; nothing was changed
        ├── StateRefused        a saved state does not belong here
        └── DecodeFailed        a decode call failed; every state is suspect

A message gives the value, the limit and the remedy, and is fit to be shown to a user as it is.
Anything else that is raised is a defect of ours.
"""

from __future__ import annotations


class OrchestratorError(Exception):
    """The root: everything this package raises on purpose."""


class RequestError(OrchestratorError):
    """The caller asked for something that cannot be done."""


class InvalidArgument(RequestError, ValueError):
    """An argument is outside its range; nothing was changed."""


class PromptTooLong(RequestError):
    """A prompt needs more cells than one request may hold.

    Attributes: `n_prompt` and `n_context`, both in tokens.
    """

    def __init__(self, n_prompt: int, n_context: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt:,} tokens, the context holds {n_context:,}; "
            "shorten the prompt or open the model with a larger context (ctx, --ctx)"
        )
        self.n_prompt = n_prompt
        self.n_context = n_context


class TemplateError(RequestError):
    """The chat template is broken, or refused these messages in its own words."""


class Busy(RequestError):
    """The queue is full and nothing was queued.

    Attributes: `waiting` requests, of at most `n_waiting`; `retry_after` in seconds, an estimate
    of when there will be room.
    """

    def __init__(self, waiting: int, n_waiting: int, retry_after: float) -> None:
        super().__init__(
            f"{waiting} requests are waiting, the queue holds {n_waiting}; "
            f"try again in {retry_after:.0f} s, or open the engine with a longer queue (queue=)"
        )
        self.waiting = waiting
        self.n_waiting = n_waiting
        self.retry_after = retry_after


class SessionBusy(InvalidArgument):
    """The session is generating a reply and takes nothing else until that ends."""


class SessionClosed(InvalidArgument):
    """The session was closed; create another one."""


class EngineClosed(RequestError):
    """The engine was closed; open a new one."""


class ConfigError(OrchestratorError):
    """A configuration file or option is wrong."""


class ModelFileError(ConfigError):
    """A path that cannot be opened as a model, found before native code reads it."""


class BackendError(OrchestratorError):
    """llama.cpp could not do what a correct call asked for."""


class PoolFull(BackendError):
    """No free cell or sequence is left; nothing was changed."""


class StateRefused(BackendError):
    """A saved state is damaged or belongs to something else.

    Attribute `field`: the header field that differs, for example ``"model"`` or ``"checksum"``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class DecodeFailed(BackendError):
    """A decode call failed in a way that leaves every state of the context suspect."""
