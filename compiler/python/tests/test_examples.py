"""The notebook and the scripts of `examples/python` run."""

import ast
import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import skip_without

EXAMPLES = Path(__file__).parents[3] / "examples" / "python"
# Not scripts of their own, and 12 GB of memory.
OTHERS = {"reference", "large"}
SCRIPTS = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem not in OTHERS)


def shown(source, names):
    """Runs a cell as a notebook does; what it prints, and its last expression."""
    body, last = ast.parse(source).body, None
    if body and isinstance(body[-1], ast.Expr):
        last = ast.Expression(body.pop().value)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        value = None if last is None else eval(compile(last, "cell", "eval"), names)
    return printed.getvalue(), value


def test_the_notebook_runs(monkeypatch):
    notebook = json.loads((EXAMPLES / "first_steps.ipynb").read_text())
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in cells), "it is kept without outputs"
    monkeypatch.chdir(EXAMPLES)
    names, pages = {}, []
    for cell in cells:
        printed, value = shown("".join(cell["source"]), names)
        assert printed or value is not None or "import" in cell["source"][0], cell["source"]
        if hasattr(value, "_repr_html_"):
            pages.append(value._repr_html_())
    assert pages[0].startswith("<iframe") and all(page.startswith("<table>") for page in pages[1:])
    assert len(pages) == 4
    assert names["losses"][0] > 4 and names["losses"][-1] < 3
    assert names["after"]["loss"] < names["before"]["loss"] - 1
    folder = names["folder"]
    assert {p.name for p in folder.iterdir()} == {"checkpoints", "model.safetensors", "trained.onnx"}
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step-00000041"


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_agree_with_torch(torch, request, name):
    script = EXAMPLES / f"{name}.py"
    imported = {
        alias.name
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for module in imported & {"transformers", "peft"}:
        if importlib.util.find_spec(module) is None:
            skip_without("torch", request, f"needs {module}")
    # With `frit` from where it was imported here.
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
