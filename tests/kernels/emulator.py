"""Kernels in CUDA C++ on the CPU: each line of PTX becomes a call of a function of emulator.h, and g++ compiles what
comes out. For what a kernel's threads and programs tell each other, not for its speed."""

import ctypes
import functools
import itertools
import re
import subprocess
import tempfile
from pathlib import Path

HEADER = Path(__file__).with_name("emulator.h")
# Fortified, a jump to another stack is taken for a mistake.
COMMAND = ["g++", "-std=c++20", "-Og", "-U_FORTIFY_SOURCE", "-fPIC", "-w"]
_FUNCTIONS = {  # what a piece of PTX holds, the longer first: its function
    "elect.sync": "elect_sync",
    "mbarrier.test_wait": "mbarrier_test_wait",
    "mov.u32 %0, %%clock": "clock",
    "movmatrix.sync.aligned.m8n8.trans.b16": "movmatrix",
    "ldmatrix.sync.aligned.m8n8.x4.shared": "ldmatrix",
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared": "ldmatrix_trans",
    "ldmatrix.sync.aligned.m8n8.x2.trans.shared": "ldmatrix_trans",
    "ld.shared.u32": "ld_shared",
    "ld.shared.u16": "ld_shared",
    "add.u32 %0, %0, %1": "add",
    "st.shared.u32": "st_shared",
    "st.shared.v4.u32": "st_shared",
    "ld.global.u32": "ld_global",
    "fence.proxy.async": "fence_proxy_async",
    "st.relaxed.gpu.global.v4.f32": "st_relaxed",
    "ld.relaxed.gpu.global.v4.f32": "ld_relaxed",
    "mbarrier.init": "mbarrier_init",
    "mbarrier.arrive.expect_tx": "mbarrier_arrive_expect_tx",
    "mbarrier.try_wait": "mbarrier_try_wait",
    "mbarrier.arrive.shared::cta": "mbarrier_arrive",
    "mbarrier.arrive.relaxed.cluster": "mbarrier_arrive_there",
    "mapa": "mapa",
    "barrier.cluster.arrive": "barrier_cluster",
    "cp.async.bulk.tensor.4d": "cp_async_bulk_tensor_4d",
    "cp.async.bulk.shared": "cp_async_bulk",
    "createpolicy": "createpolicy",
    "fence.mbarrier_init": "fence_mbarrier_init",
    "griddepcontrol.wait": "griddepcontrol_wait",
    "griddepcontrol.launch_dependents": "griddepcontrol_launch_dependents",
    "atom.acq_rel.gpu.global.add.u32": "atom_add",
    "atom.global.inc.u32": "atom_inc",
    "red.release.gpu.global.add.u32 [%0], 1": "red_add_one",
    "ld.acquire.gpu.global.u32": "ld_acquire",
    "trap": "trap",
    "bar.sync 1": "bar_sync",
    "st.relaxed.gpu.global.b64": "st_relaxed",
    "ld.relaxed.gpu.global.b64": "ld_relaxed",
    "st.relaxed.sys.global.b64": "st_relaxed",
    "ld.relaxed.sys.global.b64": "ld_relaxed",
    "ld.relaxed.gpu.global.v2.b64": "ld_relaxed",
    "ld.shared.v2.u32": "ld_shared",
    "ld.shared.v4.u32": "ld_shared",
    "ex2.approx": "ex2_approx",
    "cvt.rn.satfinite.e4m3x2.f32": "cvt_e4m3",
    "cvt.rn.satfinite.f16x2.f32": "cvt_f16",
    "cvt.rn.f16x2.e4m3x2": "cvt_f16",
    "cvt.rn.bf16x2.f32": "cvt_rn",
    "cvt.rn.bf16.f32": "cvt_rn",
    "mul.rn.bf16x2": "mul_rn",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16": "mma_sync<ptx::of_f16>",
    "mma.sync.aligned.m16n8k16": "mma_sync",
    "mma.sync.aligned.m16n8k32": "mma_sync_e4m3",
    "cp.async.cg.shared.global": "cp_async",
    "cp.async.wait_all": "cp_async_wait_all",
    ", 0, 1, 1, 0, 0;": "wgmma_first",
    "setp.ne.b32 p": "wgmma_by",
    "wgmma.mma_async": "wgmma",
    "wgmma.fence": "wgmma_fence",
    "wgmma.commit_group": "wgmma_commit",
    "wgmma.wait_group.sync.aligned 0": "wgmma_wait<0>",
    "wgmma.wait_group.sync.aligned 1": "wgmma_wait<1>",
    "wgmma.wait_group": "wgmma_wait",
    "bar.sync %0": "bar_sync_of",
    "bar.arrive": "bar_arrive",
    "setmaxnreg": "setmaxnreg",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [": "cp_async_bulk_tensor_2d",
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [": (
        "cp_async_bulk_tensor_2d"
    ),
}


def _outside(text, wanted):
    """Places of a character that stands in no string and no parentheses."""
    depth = quoted = 0
    for i, c in enumerate(text):
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (c in "([{") - (c in ")]}")
            if c == wanted and depth == 0:
                yield i


def _split(text, mark):
    places = [-1, *_outside(text, mark), len(text)]
    return [text[a + 1 : b] for a, b in itertools.pairwise(places)]


def _call(assembly):
    """``"code" : outputs : inputs : clobbers`` as a call."""
    strings, *operands = _split(assembly, ":")
    code = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', strings))
    function = "nothing" if not code else next((to for holds, to in _FUNCTIONS.items() if holds in code), None)
    if function is None:
        return f'ptx::unknown("{code}")'
    if function in ("wgmma", "wgmma_first") and ".f32.f16.f16" in code:
        function += "<ptx::of_f16>"
    given = [
        re.fullmatch(r'\s*"[^"]*"\s*\((.*)\)\s*', x, re.S)[1] for y in operands[:2] for x in _split(y, ",") if x.strip()
    ]
    return f"ptx::{function}({', '.join(given)})"


def _without_assembly(source):
    parts, at = [], 0
    for match in re.finditer(r"\basm\b(?: volatile)?(?=\s*\()", source):
        if match.start() < at:
            continue
        begin = source.index("(", match.end())
        end = begin + next(i for i in _outside(source[begin:], ")"))
        parts += [source[at : match.start()], _call(source[begin + 1 : end])]
        at = end + 1
    return "".join(parts) + source[at:]


@functools.cache
def _header():
    """HEADER, compiled once a process: every kernel includes it."""
    folder = tempfile.TemporaryDirectory()
    compiled = Path(folder.name, f"{HEADER.name}.gch")
    _compile("-x", "c++-header", "-o", compiled, HEADER)
    return folder, compiled.with_suffix("")


def _compile(*arguments):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def build(source, folder):
    """A function of (GPUs, programs of each, threads of each, seed, addresses of the arguments, one GPU's behind the
    other's), which runs the only kernel of ``source`` to its end; what went wrong, or b""."""
    kernel = re.search(
        r'extern "C" __global__ void (?:(?:__launch_bounds__\(.*\)|BOUNDS)\s*)?(\w+)\(([^{]*)\) \{', source
    )
    places = itertools.count()
    types = [re.match(r"(.*?)\w+$", argument.strip(), re.S)[1] for argument in kernel[2].split(",")]
    arguments = ", ".join(f"*({kind}*)given[{i}]" for i, kind in enumerate(types))
    text = re.sub(
        r"extern __shared__ unsigned char (\w+)\[\];",
        r"unsigned char* \1 = emulated::program().shared;",
        _without_assembly(source),
    )
    text = re.sub(
        r"__shared__ (\w+) (\w+)(\[.*\])?;",
        lambda its: f"auto& {its[2]} = emulated::fixed<{its[1]}{its[3] or ''}>({next(places)});",
        text,
    )
    text = f"""{text}
extern "C" const char* run(unsigned gpus, unsigned programs, unsigned threads, unsigned seed, void** all) {{
  return emulated::run(gpus, programs, threads, seed, [&](unsigned gpu) {{
    void** given = all + gpu * {len(types)};
    {kernel[1]}({arguments});
  }});
}}
"""
    file, library = folder / "kernel.cpp", folder / "kernel.so"
    file.write_text(text)
    _, header = _header()
    _compile("-shared", "-include", header, "-o", library, file)
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run
