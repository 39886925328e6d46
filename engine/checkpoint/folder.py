"""The folder of a run's checkpoints: tags, `latest`, what a crash left behind, and retention.

``<directory>/<tag>/manifest.json`` and ``<tag>/rank_00000.safetensors``...; ``<directory>/latest`` holds a tag. Names
that begin with a dot are work in progress: ``.<tag>.partial-<nonce>`` is being written, ``.<tag>.replaced-<nonce>`` was
``<tag>`` until a newer save took its place, ``.<tag>.pruned-<nonce>`` is being deleted.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from secrets import token_hex

from engine.checkpoint.errors import CheckpointError, listing

MANIFEST = "manifest.json"
LATEST = "latest"
_WORK_NAME = re.compile(r"\.(?P<tag>.+)\.(?P<kind>partial|replaced|pruned)-[0-9a-f]{8}")
_NUMBER = re.compile(r"([0-9]+)")
_MAX_TAG_BYTES = 200

in_progress: set[Path] = set()
"""The partial folders of saves that this process has not finished; `clean` leaves them alone."""


def default_tag(global_steps: int) -> str:
    return f"global_step{global_steps}"


def check_tag(tag: object) -> str:
    """``tag`` as a string (integers are taken as such). Raises `CheckpointError` unless it can name a folder."""
    text = str(tag) if isinstance(tag, int) and not isinstance(tag, bool) else tag
    if (
        not isinstance(text, str)
        or not text
        or text != text.strip()
        or text.startswith(".")
        or text == LATEST
        or any(character in "/\\" or not character.isprintable() for character in text)
        or len(text.encode()) > _MAX_TAG_BYTES
    ):
        raise CheckpointError(
            f"Checkpoint tag {tag!r} cannot be used: a tag is one printable folder name of 1 to {_MAX_TAG_BYTES} bytes "
            f"without path separators, no leading dot, no surrounding spaces, and not '{LATEST}'."
        )
    return text


def work_path(directory: Path, tag: str, kind: str) -> Path:
    """A fresh hidden path beside the tag; ``kind`` is partial, replaced or pruned."""
    return directory / f".{tag}.{kind}-{token_hex(4)}"


def list_tags(directory: Path) -> list[str]:
    """The tags that hold a manifest, in natural order (``step9`` before ``step10``)."""
    found = {entry.name for entry in os.scandir(directory) if entry.is_dir() and not entry.name.startswith(".")}
    tags = {name for name in found if (directory / name / MANIFEST).is_file()}
    tags |= {tag for tag, path in _replaced(directory).items() if tag not in found and (path / MANIFEST).is_file()}
    return sorted(
        tags, key=lambda tag: [(int(part) if i % 2 else 0, part) for i, part in enumerate(_NUMBER.split(tag))]
    )


def read_latest(directory: Path) -> str | None:
    """The tag that `latest` names; None where there is no such file."""
    path = directory / LATEST
    if path.exists() and not path.is_file():  # a pipe would never answer
        raise CheckpointError(f"{path} is not a regular file; write a tag into it or pass one.")
    try:
        with open(path, "rb") as file:
            content = file.read(2 * _MAX_TAG_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    try:
        return check_tag(content.decode().strip())
    except (CheckpointError, UnicodeDecodeError):
        raise CheckpointError(
            f"{path} holds {content[:80]!r}, which is no tag; write a tag into it or pass one."
        ) from None


def find(directory: Path, tag: str | None) -> tuple[str, Path] | None:
    """The tag (None: the one that `latest` names) and the folder it lies in.

    None where ``directory`` is missing or holds nothing but what crashed saves left. Raises `CheckpointError`, listing
    what is there, where it holds something but not this checkpoint.
    """
    if not directory.exists():
        return None
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder of checkpoints but a file.")
    tags = list_tags(directory)
    entries = sorted(entry for entry in os.listdir(directory) if not _WORK_NAME.fullmatch(entry))
    if not entries and not tags:
        return None
    there = f"Tags there: {listing(tags)}." if tags else f"No checkpoint is there, only: {listing(entries)}."
    if MANIFEST in entries:
        there = f"It is itself a checkpoint: pass directory={str(directory.parent)!r} and tag={directory.name!r}."
    by = "the tag asked for"
    if tag is None:
        tag, by = read_latest(directory), f"the tag that {LATEST!r} names"
        if tag is None:
            repair = " Pass one of them as the tag." if tags else ""
            raise CheckpointError(f"{directory} has no {LATEST!r} file. {there}{repair}")
    tag = check_tag(tag)
    path = directory / tag
    if not path.is_dir():
        # A save of the same tag died between moving the old one aside and moving the new one in.
        path = _replaced(directory).get(tag, path)
    if not path.is_dir():
        raise CheckpointError(f"{directory} lacks {tag!r}, {by}. {there}")
    if not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} cannot be loaded: it has no {MANIFEST}, so this engine did not write it or it was damaged. "
            f"It holds: {listing(sorted(os.listdir(path))) or 'nothing'}. {there}"
        )
    return tag, path


def _replaced(directory: Path) -> dict[str, Path]:
    """The folders that a crash left moved aside, by tag."""
    matches = [(entry, _WORK_NAME.fullmatch(entry)) for entry in os.listdir(directory)]
    return {match["tag"]: directory / entry for entry, match in matches if match and match["kind"] == "replaced"}


def clean(directory: Path) -> None:
    """Undo or finish what crashed saves and deletions left. Only one process at a time may save into a directory."""
    for tag, path in _replaced(directory).items():
        if not (directory / tag).exists():
            os.rename(path, directory / tag)
    for entry in os.listdir(directory):
        if _WORK_NAME.fullmatch(entry) and directory / entry not in in_progress:
            delete(directory / entry)
    sync(directory)


def commit(partial: Path, final: Path) -> None:
    """Make the finished folder ``partial`` the checkpoint ``final``, in place of one of that name if there is one."""
    sync(partial)
    aside = None
    if os.path.lexists(final):
        aside = work_path(final.parent, final.name, "replaced")
        os.rename(final, aside)
    try:
        os.rename(partial, final)
    except OSError:
        if aside is not None:
            os.rename(aside, final)
        raise
    sync(final.parent)
    if aside is not None:
        delete(aside)


def write_latest(directory: Path, tag: str) -> None:
    """Move `latest` to ``tag``: the last act of a save."""
    temporary = work_path(directory, LATEST, "partial")
    write_synced(temporary, (tag + "\n").encode())
    os.replace(temporary, directory / LATEST)
    sync(directory)


def write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(path: Path) -> None:
    """Delete a folder that was moved aside; what cannot be deleted now is left to the next `clean`."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()
