"""How far off predictions were on this host, kept apart from its profile: told beside a plan, never put into one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hspec_decoding.beside import Beside

KEPT = 0.9  # of the weight of earlier runs, when there is another
WORTH = 0.1  # ratios nearer to 1 are not worth a word


def record(host: str, figures: Iterable[Beside]) -> None:
    """Enter a run's ratios, measured over predicted. A state directory that cannot be written is no reason to fail."""
    known = _read()
    own = known.setdefault(host, {})
    for figure in figures:
        if figure.ratio is not None:
            total, weight, runs = own.get(figure.name, (0.0, 0.0, 0))
            own[figure.name] = (total * KEPT + figure.ratio, weight * KEPT + 1, runs + 1)
    path = _path()
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(known), "utf-8")
        partial.replace(path)


def remarks(host: str) -> Iterator[str]:
    """What earlier runs on this host say of its predictions."""
    for name, (total, weight, runs) in _read().get(host, {}).items():
        if abs(total / weight - 1) > WORTH:
            count = f"{runs} run{'s' * (runs != 1)}"
            yield f"{name}: measured {total / weight:.2f} times what was predicted, in {count} here"


def _read() -> dict[str, dict[str, tuple[float, float, int]]]:
    try:
        made = json.loads(_path().read_text("utf-8"))
        return {
            str(host): {str(name): (float(a), float(b), int(n)) for name, (a, b, n) in own.items() if b > 0}
            for host, own in made.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _path() -> Path:
    """`$XDG_STATE_HOME/hspec/corrections.json`."""
    base = Path(os.environ.get("XDG_STATE_HOME", "")).expanduser()
    return (base if base.is_absolute() else Path("~/.local/state").expanduser()) / "hspec" / "corrections.json"
