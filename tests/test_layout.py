"""The shape of the code: imports go one way, and the formula stands on its own."""

import ast
from pathlib import Path

import pytest

import attnprobe

PACKAGE = Path(attnprobe.__file__).parent
ORDER = [
    "errors",
    "masks",
    "rounding",
    "rowbounds",
    "biases",
    "terms",
    "rotary",
    "layouts",
    "formula",
    "outputs",
    "scoring",
    "folding",
    "spans",
    "words",
    "records",
    "known",
    "facts",
    "additions",
    "hub",
    "places",
    "models",
    "encoding",
    "continuations",
    "inspecting",
    "following",
    "interception",
    "hooks",
    "capturing",
    "projections",
    "residual",
    "report",
    "parts",
    "basis",
    "checks",
    "caches",
    "verification",
    "sites",
    "changes",
    "editing",
    "predicting",
    "effects",
    "variance",
    "trials",
    "ablation",
    "patching",
    "recompute",
    "looking",
    "heads",
    "remarks",
    "tables",
    "walking",
    "attribution",
    "printing",
    "views.colours",
    "views.labels",
    "views.libraries",
    "views.messages",
    "views.fonts",
    "views.raster",
    "views.page",
    "views.scripts",
    "views.still",
    "views.selection",
    "views.strips",
    "views.walk",
    "views.bertviz",
    "views.attention",
    "views.drawing",
    "views.plots",
    "views.effects",
    "views.overview",
    "exits",
    "targets",
    "kinds",
    "options",
    "cli",
]


def modules():
    """Every module's name within the package, and its file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts), path


def imports(path):
    """The modules a file imports, wherever in it, by full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_its_place():
    assert {name for name, _ in modules()} == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_a_module_imports_only_from_above(module):
    names = set(imports(dict(modules())[module]))
    imported = {
        one for one in ORDER if any(f"{name}.".startswith(f"attnprobe.{one}.") for name in names)
    }
    assert imported <= set(ORDER[: ORDER.index(module)])


PURE = [
    "masks",
    "rounding",
    "rowbounds",
    "biases",
    "terms",
    "rotary",
    "layouts",
    "formula",
    "outputs",
    "scoring",
    "folding",
]


@pytest.mark.parametrize("module", PURE)
def test_the_formula_knows_nothing_of_transformers(module):
    roots = {name.split(".")[0] for name in imports(PACKAGE / f"{module}.py")}
    assert roots <= {
        "__future__",
        "attnprobe",
        "collections",
        "dataclasses",
        "functools",
        "math",
        "threading",
        "torch",
        "typing",
    }


def test_only_hooks_knows_the_seam():
    assert [
        name for name, path in modules() if "AttentionInterface" in path.read_text(encoding="utf-8")
    ] == ["hooks"]


def test_public_names_are_there_and_documented():
    for name in attnprobe.__all__:
        assert getattr(attnprobe, name).__doc__, name
