"""The shape of the code: imports go one way, and the formula stands on its own."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import attnprobe

PACKAGE = Path(attnprobe.__file__).parent
ORDER = [
    "errors",
    "files",
    "memory",
    "masks",
    "rounding",
    "rowbounds",
    "biases",
    "terms",
    "architecture.rotary",
    "architecture.layouts",
    "formula",
    "outputs",
    "seam.scoring",
    "seam.folding",
    "spans",
    "words",
    "records",
    "architecture.known",
    "architecture.facts",
    "architecture.additions",
    "loading.hub",
    "loading.places",
    "models",
    "loading.amounts",
    "loading.encoding",
    "loading.continuations",
    "seam.inspecting",
    "seam.interrupts",
    "seam.following",
    "seam.interception",
    "hooks",
    "keeping",
    "capturing",
    "saving.reading",
    "saving.parsing",
    "saving.tensors",
    "saving.schema",
    "saving.origins",
    "saving.soundness",
    "saving.captures",
    "projections",
    "effects.residual",
    "checking.report",
    "effects.parts",
    "checking.basis",
    "checking.checks",
    "checking.caches",
    "checking.logits",
    "verification",
    "effects.sites",
    "effects.changes",
    "editing",
    "effects.predicting",
    "effects.formulas",
    "effects.trials",
    "effects.ablation",
    "effects.patching",
    "effects.variance",
    "recompute",
    "stretch",
    "looking",
    "heads",
    "roles",
    "sweeping.soundness",
    "sweeping.sources",
    "sweeping.shards",
    "sweeping.texts",
    "sweeping.plans",
    "sweeping.skewed",
    "sweeping.rows",
    "sweeping.tallies",
    "sweeping.pairs",
    "sweeping.measuring",
    "sweeping.folder",
    "sweeping.identity",
    "sweeping.frames",
    "sweeping.results",
    "sweeping.engines",
    "sweeping.corpora",
    "remarks",
    "tables",
    "walking",
    "effects.attribution",
    "command.printing",
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
    "views.captions",
    "views.effects",
    "views.histograms",
    "views.overview",
    "command.exits",
    "command.targets",
    "command.kinds",
    "command.options",
    "command.sweeps",
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


def imports_at_once(path):
    """What a file imports when it is imported itself, not later in a function or for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    now = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in now:
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            yield node.module
            names = [f"{node.module}.{name}" for name in names]
        yield from names


def reached(*starts):
    """The modules of the package that these import at once, and the outer packages."""
    files, outer, todo = dict(modules()), set(), list(starts)
    seen = set(starts)
    while todo:
        for name in imports_at_once(files[todo.pop()]):
            inner = name.removeprefix("attnprobe.")
            if inner in files and inner not in seen:
                seen.add(inner)
                todo.append(inner)
            outer.add(name.split(".")[0])
    return seen, outer - {"attnprobe"}


def test_verifying_waits_for_no_library_that_it_does_not_use():
    seen, outer = reached("cli", "capturing", "verification", "command.printing", "models")
    assert {"checking.checks", "checking.report", "formula", "loading.hub"} <= seen
    assert {"torch", "transformers", "typer"} <= outer
    assert not outer & {"pandas", "numpy", "matplotlib", "bertviz", "pyarrow", "jinja2", "PIL"}


def test_importing_attnprobe_imports_nothing_heavy():
    code = "import sys; before = set(sys.modules); import attnprobe; attnprobe.__all__\n"
    code += "print({name.partition('.')[0] for name in set(sys.modules) - before})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = ast.literal_eval(done.stdout)
    assert "attnprobe" in imported
    assert not {one for one in imported if one not in sys.stdlib_module_names} - {"attnprobe"}


PURE = [
    "masks",
    "rounding",
    "rowbounds",
    "biases",
    "terms",
    "architecture.rotary",
    "architecture.layouts",
    "formula",
    "outputs",
    "seam.scoring",
    "seam.folding",
]


@pytest.mark.parametrize("module", PURE)
def test_the_formula_knows_nothing_of_transformers(module):
    roots = {name.split(".")[0] for name in imports(dict(modules())[module])}
    assert roots <= {
        "__future__",
        "attnprobe",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
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
