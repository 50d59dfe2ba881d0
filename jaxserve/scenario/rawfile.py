"""Opens a text input, plain or gzip, and turns every way in which that can fail into one `InputError`."""

import gzip
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from jaxserve.errors import InputError

MAX_TOKENS = 2**31 - 1  # lengths travel as int32 on a device; no file may ask for more
HEAD_BYTES = 65536  # enough for any header and its first row
GZIP_MAGIC = b"\x1f\x8b"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """Yield the decompressed bytes of `path`; errors of the file that surface while it is read become `InputError` too.

    Gzip is known by its magic bytes, whatever the name. UTF-16 and binary content are refused here, so that readers only meet text.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a directory; also a pipe or device, which could block for ever
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise InputError(f"{path}: is {kind}; give the path of a file.")
        with path.open("rb") as raw:
            magic = raw.read(2)
            raw.seek(0)
            if magic == GZIP_MAGIC:
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    stream = cast(BinaryIO, unpacked)
                    _check_text(path, stream)
                    yield stream
            elif path.suffix.lower() == ".gz" and magic:
                raise InputError(f"{path}: has a name that ends in .gz but is not gzip data; rename the file or compress it.")
            else:
                _check_text(path, raw)
                yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: is damaged or truncated gzip data; fetch or compress the file again.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text (byte {error.start} of a line or block is invalid); save it as UTF-8.") from error
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; check the path (relative paths start at the scenario file's folder).") from error
    except PermissionError as error:
        raise InputError(f"{path}: no permission to read this file; change its mode or give another file.") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check the path and the disk.") from error


def _check_text(path: Path, stream: BinaryIO) -> None:
    """Refuse what is not UTF-8-like text by its first bytes, then rewind."""
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    if head.startswith(UTF16_MARKS):
        raise InputError(f"{path}: is UTF-16 text; save it as UTF-8.")
    if b"\0" in head:
        raise InputError(f"{path}: holds binary data (a NUL byte in its first {HEAD_BYTES} bytes); give a UTF-8 text file.")
    if not head.strip(b"\xef\xbb\xbf \t\r\n"):
        raise InputError(f"{path}: is empty; give a file with a header and at least one row.")


def resolve(base_dir: Path, path: str, field: str) -> Path:
    """Path of a file named in the scenario: relative ones start at `base_dir`, the scenario file's folder."""
    if "\0" in path:
        raise InputError(f"{field}: the path holds a NUL character; remove it.")
    return base_dir / path
