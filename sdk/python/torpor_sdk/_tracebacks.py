"""An exception as the text that a person gets to read: the operator's lines, without the SDK's own around them."""

import traceback

from .errors import TorporError

FRAMES_MAX = 40
TEXT_CHARACTERS_MAX = 16_000
# Of a line, or of what an exception says of itself: a huge message must not push out what kind of error it is.
PART_CHARACTERS_MAX = 600
_PACKAGE = __name__.rpartition(".")[0]
_FROZEN = f"<frozen {_PACKAGE}"
_IN_FOLDER = f"/{_PACKAGE}/"


def render(exc: BaseException) -> str:
    """The traceback, at most 16,000 characters, the last line (what happened) always among them."""
    try:
        shown = traceback.TracebackException(type(exc), exc, exc.__traceback__, limit=-FRAMES_MAX)
        _strip(shown, exc, set())
        text = "".join(_shortened(part, PART_CHARACTERS_MAX) for part in shown.format()).rstrip()
    except (MemoryError, RecursionError):
        text = f"{type(exc).__name__} (no memory left for a traceback)"
    except Exception as broken:
        # An exception class of the operator may break whatever looks at it.
        text = f"{type(exc).__name__} (its traceback cannot be shown: {type(broken).__name__})"
    return _shortened(text, TEXT_CHARACTERS_MAX)


def _shortened(text: str, limit: int) -> str:
    """The middle left out where there are more characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def _strip(shown: traceback.TracebackException, exc: BaseException, seen: set[int]) -> None:
    """Takes the SDK's frames away before the operator's, and after them where the SDK raised on purpose."""
    if id(exc) in seen:
        return
    seen.add(id(exc))
    frames = list(shown.stack)
    # In a guest everything but the operator is frozen: the embedding's part and the import system too.
    while frames and (_is_own(frames[0].filename) or frames[0].filename.startswith("<frozen ")):
        del frames[0]
    while frames and isinstance(exc, TorporError) and _is_own(frames[-1].filename):
        del frames[-1]
    if frames or isinstance(exc, TorporError | SyntaxError):
        shown.stack[:] = frames
    if shown.__cause__ is not None and exc.__cause__ is not None:
        _strip(shown.__cause__, exc.__cause__, seen)
    if shown.__context__ is not None and exc.__context__ is not None:
        _strip(shown.__context__, exc.__context__, seen)


def _is_own(filename: str) -> bool:
    return filename.startswith(_FROZEN) or _IN_FOLDER in filename.replace("\\", "/")


def has_operator_lines(exc: BaseException) -> bool:
    """Whether any line outside of the SDK took part."""
    here = exc.__traceback__
    while here is not None:
        filename = here.tb_frame.f_code.co_filename
        if not _is_own(filename) and not filename.startswith("<frozen "):
            return True
        here = here.tb_next
    return False
