"""Keep tags and notes of runs in a file beside them: the runs themselves are never written to."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tensortap.store.files import load_json
from tensortap.text import a_kind
from tensortap.view.api.query import RequestError
from tensortap.view.api.run_finder import RunFinder

NOTES_JSON: Final = "tensortap-notes.json"
LONGEST: Final = 4000  # letters of a note
_MOST_TAGS: Final = 16
_LONGEST_TAG: Final = 40
_MOST_RUNS: Final = 10_000
_NONE: Final = {"tags": [], "note": ""}


class RunNotes:
    """Tags and notes of the runs below a folder; for a single run the file lies beside its folder.

    >>> import tempfile, tensortap as tt
    >>> folder = tempfile.mkdtemp()
    >>> notes = RunNotes(RunFinder(folder))
    >>> notes.write("exp1", tags=["baseline"], note="the first that converged")
    >>> notes.of("exp1")["tags"], notes.of("exp2")
    (['baseline'], {'tags': [], 'note': ''})
    """

    def __init__(self, found: RunFinder) -> None:
        root = found.root
        folder = root.parent if root is not None and found.alone else root
        self._path: Path | None = None if folder is None else folder / NOTES_JSON
        self._lock = threading.Lock()

    def of(self, ident: str) -> dict[str, Any]:
        """Return the tags and the note of a run."""
        return self.all().get(ident, dict(_NONE))

    def all(self) -> dict[str, dict[str, Any]]:
        """Return the tags and notes of all runs; what cannot be read counts as none."""
        try:
            said = load_json(self._path.read_bytes()) if self._path is not None else {}
        except (OSError, ValueError):
            return {}
        runs = said.get("runs", {}) if isinstance(said, dict) else {}
        return {str(ident): _plain(entry) for ident, entry in runs.items() if isinstance(entry, dict)}

    def write(self, ident: str, tags: Sequence[str], note: str) -> None:
        """Replace the tags and the note of a run; nothing of both forgets it."""
        if self._path is None:
            raise RequestError("notes are kept beside runs on this machine; this folder is elsewhere")
        entry = _checked(tags, note)
        with self._lock:
            known = {name: said for name, said in self.all().items() if name != ident}
            if entry["tags"] or entry["note"]:
                known[ident] = entry
            if len(known) > _MOST_RUNS:
                raise RequestError(
                    f"at most {_MOST_RUNS} runs can have notes, got one more: delete the note of another run"
                )
            self._replace(known)

    def _replace(self, known: Mapping[str, Any]) -> None:
        assert self._path is not None
        hidden = self._path.with_name(f".{NOTES_JSON}.{os.getpid()}")
        try:
            hidden.write_text(json.dumps({"runs": known}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            hidden.replace(self._path)
        except OSError as error:
            hidden.unlink(missing_ok=True)
            raise RequestError(f"the note cannot be kept: {error}", f"make {self._path} writable") from error


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    tags = entry.get("tags", ())
    return {"tags": [str(tag) for tag in tags] if isinstance(tags, list) else [], "note": str(entry.get("note", ""))}


def _amount(note: Any) -> str:
    return f"{len(note)} letters" if isinstance(note, str) else a_kind(note)


def _checked(tags: Any, note: Any) -> dict[str, Any]:
    if not isinstance(note, str) or len(note) > LONGEST:
        raise RequestError(f"a note must be a text of at most {LONGEST} letters, got {_amount(note)}")
    if not isinstance(tags, (list, tuple)) or not all(isinstance(tag, str) for tag in tags):
        raise RequestError(f"tags must be a list of words, got {a_kind(tags)}", 'write "tags": ["baseline"]')
    clean = list(dict.fromkeys(word for tag in tags if (word := " ".join(tag.split()))))
    if len(clean) > _MOST_TAGS or any(len(tag) > _LONGEST_TAG for tag in clean):
        raise RequestError(
            f"tags must be at most {_MOST_TAGS}, of at most {_LONGEST_TAG} letters each, got {len(clean)}"
        )
    return {"tags": clean, "note": note.strip()}
