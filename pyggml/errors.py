"""The errors that pyggml raises. Each is a subclass of the builtin it refines, so `except ValueError` works too."""


def escaped(text: str) -> str:
    """`text` with each letter that cannot be printed as Python writes it: `\\n`, `\\x1b`."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class PyggmlError(Exception):
    """Base of all errors that pyggml raises on purpose. The message is one line: what was found and what is legal.

    Names come from files and may hold anything: what cannot be printed is escaped, line ends and terminal codes too.
    """

    def __str__(self) -> str:
        return escaped(super().__str__())


class ShapeError(PyggmlError, ValueError):
    """A tensor's ne or nb does not fit the op, the view or the array given for it."""


class DTypeError(PyggmlError, TypeError):
    """A tensor has a type that the op or the view does not take."""


class ParamError(PyggmlError, ValueError):
    """An op parameter, option or argument is outside its legal range."""


class UnsupportedOp(PyggmlError, NotImplementedError):
    """No kernel of the backend takes this node; the message holds each kernel's reason."""


class GraphError(PyggmlError, ValueError):
    """A graph cannot be run as asked: an input without data, a tensor that is not part of it."""


class FormatError(PyggmlError, ValueError):
    """A file is not what its format promises: the message names file, key or tensor, what was found and what is legal."""


class ModelError(PyggmlError, ValueError):
    """A well-formed file does not hold a model that pyggml can run: keys or tensors missing, unread or misshapen."""


class ContextError(PyggmlError, RuntimeError):
    """A context cannot take this call now: full, closed, unknown sequence, or a sequence left invalid by an aborted step."""


class KernelError(PyggmlError, RuntimeError):
    """A kernel met bad data (such as an id out of range) or could not be compiled."""
