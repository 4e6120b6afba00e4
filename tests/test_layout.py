"""The shape of the source tree: which way imports point, and who may import what."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierkv
from tests.conftest import ROOT

PACKAGE = ROOT / "tierkv"
FILES = sorted(PACKAGE.rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAX_LINES = 400

ORDER = (
    "cli", "bench", "api", "hf", "attention", "selection", "paging", "tiers", "codecs", "kernels",
    "leaf",
)  # fmt: skip
"""Imports point down this list, never up."""

LEAVES = {"codec_names", "config", "errors", "page", "stats", "units"}
FOUNDATIONS = {"tierkv.codec_names", "tierkv.errors", "tierkv.units"}
"""What even a leaf may import."""

DOORS = {
    "lmdb": "tierkv/tiers/catalogue.py",
    "cupy": "tierkv/kernels/",
    "transformers": "tierkv/hf/",
    "yaml": "tierkv/config.py",
    "rich": ("tierkv/cli_report.py", "tierkv/cli_bench.py", "tierkv/cli_eval.py"),
    "matplotlib": ("tierkv/bench/plots.py", "tierkv/bench/quality_plot.py"),
    "xxhash": "tierkv/tiers/",
    "fcntl": ("tierkv/tiers/", "tierkv/hf/loading.py"),
}
"""Dependency -> the only file or folder that may import it."""

CUDA_OBJECTS = {"Stream", "Event", "ExternalStream"}


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def module(file: Path) -> str:
    return name(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def layer(module_name: str) -> str:
    part = module_name.split(".")[1]
    if part in LEAVES:
        return "leaf"
    return "cli" if part == "doctor" or part.split("_")[0] == "cli" else part


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, imported module), also of imports inside functions, not of type checking."""
    tree = ast.parse(file.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(file)}:{node.lineno}: relative import"
            source = node.module or ""
            for alias in node.names:
                whole = f"{source}.{alias.name}"
                is_module = (ROOT / f"{whole.replace('.', '/')}.py").exists()
                yield node.lineno, whole if is_module else source


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20


@pytest.mark.parametrize("file", FILES, ids=name)
def test_imports_point_down(file: Path) -> None:
    if file == PACKAGE / "__init__.py":
        assert not [target for _, target in imports(file) if target.startswith("tierkv")]
        return
    own = layer(module(file))
    assert own in ORDER, f"{name(file)} belongs to no layer of {ORDER}"
    for line, target in imports(file):
        if target == "tierkv":
            assert own == "cli", f"{name(file)}:{line} imports the public package"
        elif target.startswith("tierkv."):
            where = f"{name(file)}:{line} ({own}) imports {target}"
            if own == "leaf":
                assert target in FOUNDATIONS, where
            assert ORDER.index(layer(target)) >= ORDER.index(own), where


@pytest.mark.parametrize("file", FILES, ids=name)
def test_one_door_per_dependency(file: Path) -> None:
    for line, target in imports(file):
        allowed = DOORS.get(target.split(".")[0])
        if allowed is not None:
            assert name(file).startswith(allowed), f"{name(file)}:{line} imports {target}"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_only_transfer_creates_streams_and_events(file: Path) -> None:
    if name(file) == "tierkv/tiers/transfer.py":
        return
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in CUDA_OBJECTS:
            text = ast.unparse(node)
            assert not text.startswith("torch"), f"{name(file)}:{node.lineno} uses {text}"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_file_is_long(file: Path) -> None:
    lines = len(file.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name(file)} has {lines} lines, {MAX_LINES} are allowed"


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_pickle(file: Path) -> None:
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    for line, target in imports(file):
        assert target.split(".")[0] not in banned, f"{name(file)}:{line} imports {target}"
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):  # torch.load and torch.save pickle
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "torch.save"), f"{name(file)}:{node.lineno}"


def test_cuda_is_no_package() -> None:
    """An __init__.py there would shadow the cuda.* namespace that CuPy imports."""
    assert not (ROOT / "cuda" / "__init__.py").exists()
    assert not (PACKAGE / "cuda" / "__init__.py").exists()


def test_file_map_is_complete() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listed = set(re.findall(r"^\| `((?:tierkv|cuda)/[^`]+)` \|", text, re.MULTILINE))
    assert listed == {name(file) for file in (*FILES, *(ROOT / "cuda").iterdir())}


def test_readme_shows_output_in_its_first_40_lines() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()[:40]
    for text in ("make demo", "make test", "prompt tokens", "ms/token"):
        assert any(text in line for line in lines), text


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", (ROOT / document).read_text()):
        assert "://" in link or (ROOT / link).exists(), link


def test_readme_snippet_runs(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snippet = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    for placeholder, place in (("MODEL_DIR", tiny_model_dir), ("STORE_DIR", tmp_path)):
        assert placeholder in snippet
        snippet = snippet.replace(placeholder, str(place))
    exec(compile(snippet, "README.md", "exec"), {})
    assert "hot" in capsys.readouterr().out


def test_pyproject() -> None:
    project = PYPROJECT["project"]
    assert project["name"] == "tierkv-offload"
    assert project["scripts"] == {"tierkv": "tierkv.cli:main"}


def test_every_package_is_installed() -> None:
    """Setuptools finds none by itself: cuda/ lies outside tierkv/ but belongs into it."""
    folders = {name(file.parent).replace("/", ".") for file in FILES}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders | {"tierkv.cuda"})


def test_every_cuda_source_is_installed() -> None:
    settings = PYPROJECT["tool"]["setuptools"]
    assert settings["package-dir"]["tierkv.cuda"] == "cuda"
    patterns = settings["package-data"]["tierkv.cuda"]
    for file in (ROOT / "cuda").iterdir():
        assert any(file.match(pattern) for pattern in patterns), name(file)


def test_version_is_in_the_changelog() -> None:
    assert f"## {tierkv.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_data_is_there() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert (PACKAGE / "data" / "lighthouse.txt").stat().st_size > 20_000
