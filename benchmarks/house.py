"""Size and shape of the package, read from its source alone: nothing is imported.

    python benchmarks/house.py [CHECKOUT ...]

One column per checkout, for figures before and after a change (`git worktree add /tmp/before ca32bb5`):

- lines, files and packages (folders with Python files) of `asyncrl/`; files below 40 lines; the largest file;
- modules with one importer; modules in import circles, imports for types and inside functions included.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path

import networkx as nx  # type: ignore[import-untyped]

SMALL = 40


def modules(root: Path) -> dict[str, Path]:
    """Files of the package by module name."""
    found = {}
    for path in sorted((root / "asyncrl").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found |= {name if (name := f"{node.module}.{a.name}") in known else node.module for a in node.names}
    return found & known.keys()


def figures(root: Path) -> dict[str, int]:
    """All figures of a checkout, in the order of the table."""
    known = modules(root)
    trees = {module: ast.parse(path.read_text()) for module, path in known.items()}
    graph = {module: imports(tree, known) - {module} for module, tree in trees.items()}
    importers = Counter(module for wanted in graph.values() for module in wanted)
    lines = {module: path.read_text().count("\n") for module, path in known.items()}
    around = [found for found in nx.strongly_connected_components(nx.DiGraph(graph)) if len(found) > 1]
    return {
        "lines": sum(lines.values()),
        "files": len(known),
        "packages": len({path.parent for path in known.values()}),
        "entries of asyncrl/": len([p for p in (root / "asyncrl").iterdir() if not p.name.startswith(("_", "."))]),
        f"files below {SMALL} lines": sum(0 < count < SMALL for count in lines.values()),
        "largest file": max(lines.values()),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "import circles": len(around),
        "modules in circles": sum(map(len, around)),
    }


def main() -> None:
    """Print the table."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]], metavar="CHECKOUT")
    roots = command.parse_args().checkouts
    columns = [figures(root) for root in roots]
    print(f"{'':36}" + "".join(f"{root.resolve().name:>16}" for root in roots))
    for name in columns[0]:
        print(f"{name:36}" + "".join(f"{column[name]:>16}" for column in columns))


if __name__ == "__main__":
    main()
