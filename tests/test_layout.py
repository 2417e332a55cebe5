"""The repository keeps its own rules: source roots, the direction of imports, sizes of files, no private paths."""

from __future__ import annotations

import ast
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOTS = {
    "decoding": "hspec_decoding",
    "offload": "hspec_offload",
    "kernels": "hspec_kernels",
    "profiles": "hspec_profiles",
}
PACKAGES = {"hspec_cli": ROOT / "hspec_cli", **{package: ROOT / root / package for root, package in ROOTS.items()}}
ALLOWED = {
    "hspec_cli": {"hspec_decoding", "hspec_offload", "hspec_profiles"},
    "hspec_decoding": {"hspec_offload", "hspec_profiles", "hspec_kernels"},
    "hspec_offload": {"hspec_profiles", "hspec_kernels"},
    "hspec_kernels": set(),
    "hspec_profiles": set(),
}
LONGEST = 400  # lines of a file
IGNORED = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


def modules(package: str) -> Iterator[Path]:
    return PACKAGES[package].rglob("*.py")


def imported(path: Path) -> Iterator[str]:
    """Top-level names of everything a module imports, wherever in the file, also by name through importlib."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            yield from (str(arg.value).split(".")[0] for arg in node.args if isinstance(arg, ast.Constant))


@pytest.mark.parametrize("root", ROOTS)
def test_source_roots_hold_their_package_only(root: str) -> None:
    """A stray module would be a global `import bench`; an `__init__.py` would shadow another package's name."""
    found = {path.name for path in (ROOT / root).iterdir()} - IGNORED
    assert found - {"README.md"} == {ROOTS[root]}
    assert (PACKAGES[ROOTS[root]] / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_of_a_package_is_a_package(package: str) -> None:
    for path in modules(package):
        assert (path.parent / "__init__.py").exists(), path


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    for path in modules(package):
        ours = {name for name in imported(path) if name.startswith("hspec")}
        assert ours <= ALLOWED[package] | {package}, path


@pytest.mark.parametrize("package", ["hspec_decoding", "hspec_offload", "hspec_kernels", "hspec_profiles"])
def test_only_the_command_line_prints(package: str) -> None:
    for path in modules(package):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        assert not [call.lineno for call in calls if ast.unparse(call.func) in ("print", "input")], path
        assert not {"rich", "typer"} & set(imported(path)), path


def test_all_files_are_short() -> None:
    sources = [path for package in PACKAGES for path in modules(package)]
    long = {str(path): n for path in sources if (n := len(path.read_text("utf-8").splitlines())) > LONGEST}
    assert not long


def test_packages_of_the_wheel() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    build = pyproject["tool"]["hatch"]["build"]
    assert {ROOT / path for path in build["targets"]["wheel"]["packages"]} == set(PACKAGES.values())
    assert set(build["dev-mode-dirs"]) == {".", *ROOTS}


def test_the_wheel_holds_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hatchling.build import build_wheel

    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    calibrations = list((PACKAGES["hspec_decoding"] / "calibrations").iterdir())
    assert calibrations
    assert {f"hspec_decoding/calibrations/{path.name}" for path in calibrations} <= set(names)
    assert all(name.startswith(("hspec_", "hspec-")) for name in tops), tops
    assert set(PACKAGES) <= tops


def tracked() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_no_private_paths() -> None:
    """Nothing that is, or will be, tracked speaks of the machine it was written on."""
    private = [b"/" + word + b"/" for word in (b"work", b"home", b"root", b"Users")]
    for path in tracked():
        data = path.read_bytes()
        assert not [word for word in private if word in data], path
