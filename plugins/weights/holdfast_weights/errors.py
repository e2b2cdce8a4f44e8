"""Errors of this package. An OSError means that a local file or disk failed."""


class FolderError(ValueError):
    """A folder or a delta is not the published one, or cannot be read. Nothing was changed."""


class MissingError(FolderError):
    """A file that was expected does not exist."""


# Errors of reading a JSON document of another form.
NOT_AS_EXPECTED = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)
