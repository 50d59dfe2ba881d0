"""Where results are to be written, looked at before the work begins."""

import tempfile
from pathlib import Path

from jaxserve.errors import InputError


def check_free(path: Path, *, folder: bool = False) -> None:
    """Raise `InputError` where `path` cannot become a new file (or a new folder, with those above it): better told before than after."""
    try:
        if path.exists() or path.is_symlink():
            raise InputError(f"{path}: exists already and is left as it is; choose another --out")
        parent = path.absolute().parent
        if folder:
            parent = next(above for above in path.absolute().parents if above.exists())
        if not parent.is_dir():
            what = f"{parent} is no folder" if parent.exists() else f"there is no folder {path.parent} to write in; make it"
            raise InputError(f"{path}: {what}" + (" or choose another --out" if not parent.exists() else "; choose another --out"))
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error}); choose another --out") from None
