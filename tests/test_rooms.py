"""Which room imports which: dependencies run one way, from what a user touches down to the kernels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import minivllm

ROOT = Path(minivllm.__file__).parent
# Files in no room: these import no room, and everybody may import them; the others put rooms together.
OF_ALL = {
    "bytecode", "child_process", "cores", "errors", "files", "frames", "missing", "modules", "naming", "rounding",
    "version",
}  # fmt: skip
# room -> rooms above it here that it may import at run time
MAY = {
    "kernels": set(),
    "core": {"kernels"},
    "lora": {"core"},  # a name of vLLM's
    "layers": {"core", "kernels"},
    "models": {"core", "layers"},
    "backends": {"core", "kernels"},
    "plugins": set(),
    "config": {"core", "plugins"},
    "executors": {"backends", "config", "core", "kernels", "layers", "models", "plugins"},
    "serve": {"config", "core", "models"},
    "bench": {"backends", "config", "core", "executors", "kernels", "models", "plugins"},
    "testing": {"config", "core", "kernels", "layers", "models", "plugins"},
}
# room -> rooms that it also names, for annotations alone
NAMES = {
    "core": {"config", "models", "plugins"},  # what it is handed: options, a tokenizer, a registry
    "backends": {"config", "plugins"},  # the same
    "plugins": {"config", "core"},  # of whom a rank's registry says what it lacks
}
EXCEPTIONS = {
    ("kernels/attention/cascade.py", "core.batch"): "annotations, as Triton needs them; it is handed a Cascade",
    ("kernels/sampling/sampling.py", "core.parallel"): "the same; it is handed a TensorParallel",
    ("core/engine.py", "assemble"): "LLMEngine.from_config, for who has a config and no parts",
    ("layers/decoder.py", "models.loader"): "how a model loads its weights unless it says otherwise",
    ("models/checkpoint.py", "config.engine_config"): "annotations; it is handed ModelOptions",
    ("models/tokenizer.py", "config.engine_config"): "the same",
    ("plugins/builtin.py", "config.conf_dir"): "where the folder of the built-in options lies, and nothing else",
    ("serve/engine_process.py", "assemble"): "mode=serve puts an engine together",
    ("bench/cli.py", "assemble"): "mode=bench does",
    ("testing/attention.py", "llm"): "conformance suites run whole engines",
    ("testing/model.py", "llm"): "the same",
}


def imports(node: ast.AST, named: bool = False) -> Iterator[tuple[str, bool]]:
    """Modules of ours that a file imports, wherever it does, and whether only type checkers see it."""
    for child in ast.iter_child_nodes(node):
        modules = [alias.name for alias in child.names] if isinstance(child, ast.Import) else []
        if isinstance(child, ast.ImportFrom) and child.module:
            modules = [child.module if child.module != "minivllm" else f"minivllm.{a.name}" for a in child.names]
        yield from ((m.removeprefix("minivllm."), named) for m in modules if m.startswith("minivllm."))
        yield from imports(child, named or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)))


def test_dependencies_run_one_way() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == MAY.keys()
    rooms = list(MAY)
    assert all(rooms.index(above) < at for at, room in enumerate(rooms) for above in MAY[room])
    found = set()
    for path in ROOT.rglob("*.py"):
        file = path.relative_to(ROOT)
        room = file.parts[0] if len(file.parts) > 1 else ""
        if "templates" in file.parts or (not room and file.stem not in OF_ALL):
            continue
        for module, named in imports(ast.parse(path.read_text(encoding="utf-8"))):
            may = {room, *OF_ALL, *MAY.get(room, ()), *(NAMES.get(room, ()) if named else ())}
            if module.split(".")[0] not in may:
                found.add((file.as_posix(), module))
    assert sorted(found - EXCEPTIONS.keys()) == [], "what it must not import"
    assert sorted(EXCEPTIONS.keys() - found) == [], "exceptions that are none any more"
