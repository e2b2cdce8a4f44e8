"""``make bench``: run every benchmark, one after the other; tables go to the terminal, JSON to ``bench_out/``."""

from pathlib import Path

from . import dump_digest, hf_memory

OUT = Path("bench_out")

if __name__ == "__main__":
    OUT.mkdir(exist_ok=True)
    hf_memory.main(["--json", str(OUT / "hf_memory.json")])
    dump_digest.main(["--json", str(OUT / "dump_digest.json")])
