"""Reads a TOML file; whatever stands in the way is one sentence that names the file."""

import stat
import tomllib
from pathlib import Path
from typing import Any

from jaxserve.errors import InputError


def read_toml(path: Path, what: str, if_absent: str) -> dict[str, Any]:
    """The table in `path`; `what` names the kind of file ("scenario"), `if_absent` says what could have been given instead."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise InputError(f"{path}: is a directory; give the {what}'s .toml file")
        if not stat.S_ISREG(mode):  # a pipe or device could block for ever
            raise InputError(f"{path}: is not a regular file; give the {what}'s .toml file")
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path}: there is no such {what} file; {if_absent}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text; save the {what} as UTF-8") from None
    except PermissionError:
        raise InputError(f"{path}: no permission to read this {what} file; change its mode or give another file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); check the path and the disk") from None
    if not text.strip():
        raise InputError(f"{path}: the file is empty; see the shipped ones for what belongs in a {what}")
    return parse_toml(text, str(path))


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table that `text` holds."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{where}: not valid TOML: too deeply nested") from None
    except ValueError as error:  # TOMLDecodeError; also a number of thousands of digits
        raise InputError(f"{where}: not valid TOML: {error}") from None
