"""Run the notebooks from top to bottom and write them back with what came out.

`python scripts/notebooks.py` runs all of notebooks/, each in a fresh kernel; `--check` runs them
too, writes nothing, and says which would change in what they show.

What is written back is what a reader on a code-hosting site can see. There, scripts and frames are
taken out and HTML goes before pictures, so of a view only its still picture is kept. Whoever runs
the notebook has the view itself.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "notebooks"
SECONDS = 300
"""The longest that one cell may take, on a machine that is busy with other things too."""


def notebooks() -> list[Path]:
    """All notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def run(path: Path) -> NotebookNode:
    """Run a notebook in a fresh kernel, in its own folder; the file stays as it is.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    return NotebookClient(
        notebook, kernel_name="python3", timeout=SECONDS, resources=resources
    ).execute()


def tidy(notebook: NotebookNode) -> NotebookNode:
    """A copy as it is kept: stills for views, and nothing that differs from run to run."""
    kept = copy.deepcopy(notebook)
    kept.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    ids: dict[str, str] = {}
    for number, cell in enumerate(kept.cells, 1):
        cell.id = f"cell-{number:02}"
        cell.metadata = NotebookNode()
        if cell.cell_type == "code":
            cell.outputs = _tidy_outputs(cell.outputs, ids)
    return kept


def _tidy_outputs(outputs: list[NotebookNode], ids: dict[str, str]) -> list[NotebookNode]:
    """Outputs as they are kept; `ids` gathers what the tables of the whole notebook are called.

    pandas gives each styled table a random id. They are counted through instead, as the styles of
    two tables with one id would meet.
    """
    kept: list[NotebookNode] = []
    for output in outputs:
        data = output.get("data", {})
        if "<iframe" in data.get("text/html", "") and "image/png" in data:
            del data["text/html"]
        if "text/html" in data:
            data["text/html"] = re.sub(
                r"\bT_[0-9a-f]{5}",
                lambda found: ids.setdefault(found[0], f"T_{len(ids):05}"),
                data["text/html"],
            )
        if "text/plain" in data:
            data["text/plain"] = re.sub(r" at 0x[0-9a-f]+", "", data["text/plain"])
        if output.get("name") == "stdout" and kept and kept[-1].get("name") == "stdout":
            kept[-1].text += output.text  # however many pieces the kernel sent it in
        elif output.get("name") != "stderr":  # progress bars
            kept.append(output)
    return kept


def kinds(notebook: NotebookNode) -> list[list[tuple[str, ...]]]:
    """What each code cell shows: for each output its type, and the kinds of data in it."""
    return [
        [(one.output_type, *sorted(one.get("data", {}))) for one in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def main() -> int:
    """Run all; 1 if `--check` finds one that is stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what is stale")
    check = parser.parse_args().check
    stale = []
    for path in notebooks():
        start = time.perf_counter()
        ran = tidy(run(path))
        if not check:
            nbformat.write(ran, path)
        elif kinds(ran) != kinds(nbformat.read(path, as_version=4)):
            stale.append(path.name)
        size = len(nbformat.writes(ran)) / 1024
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {size:.0f} KB")
    if stale:
        print(f"stale, run `make notebooks`: {', '.join(stale)}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
