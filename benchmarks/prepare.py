"""How fast `eyas prepare` is beside the bare tokenizer and beside datasets.map, and how much memory it takes.

    python benchmarks/prepare.py --name two-cores [--rows 1000,5000] [--memory-rows 10000,100000] [--work DIR]

Over the same conversations (words of this repository's texts, two turns in a third of them): the tokenizer's own
`encode_batch` of the rendered texts, `eyas prepare` from the file to the samples, and, where `datasets` is installed,
`Dataset.map` with `apply_chat_template` (ids alone, no mask), each with all cores. Each is a process of its own, run on
a small and on a large file, in turns; rates are those of the difference, so that imports and starts are not in them.
Processor seconds are those of the whole process tree: on a machine that others use they say more than the clock.
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"
BARE = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]).backend_tokenizer
texts = json.load(open(sys.argv[2]))
tokens = 0
for first in range(0, len(texts), 1000):
    tokens += sum(len(one) for one in tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False))
print(tokens)
"""
MAP = """
import sys
import datasets
from transformers import AutoTokenizer
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
def render(row):
    return {"ids": tokenizer.apply_chat_template(row["messages"], return_dict=False)}
rows = datasets.load_dataset("json", data_files=sys.argv[2], split="train", cache_dir=sys.argv[3])
made = rows.map(render, num_proc=int(sys.argv[4]), remove_columns=rows.column_names)
print(sum(map(len, made["ids"])))
"""


def conversations(rows: int, words: int, seed: int) -> list[dict]:
    """Conversations of about `words` words, with the words of the documentation."""
    random.seed(seed)
    known = " ".join(path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md"))).split()

    def text(length: int) -> str:
        return " ".join(random.choices(known, k=random.randint(length // 2, length * 3 // 2)))

    made = []
    for number in range(rows):
        turns = 2 if number % 3 == 0 else 1
        messages = []
        for _ in range(turns):
            messages.append({"role": "user", "content": f"{number} {text(words // 4 // turns)}"})
            messages.append({"role": "assistant", "content": text(words * 3 // 4 // turns)})
        made.append({"messages": messages})
    return made


def run(command: list[str]) -> dict:
    """A process to its end: seconds, processor seconds and peak of anonymous memory of its tree, stdout."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.time()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    peak = [0]

    def watch() -> None:
        while process.poll() is None:
            peak[0] = max(peak[0], sum(map(anonymous, tree(process.pid))))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, errors = process.communicate()
    watcher.join()
    assert process.returncode == 0, errors
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    wall = time.time() - began
    return {"wall": round(wall, 2), "cpu": round(cpu, 2), "peak_mib": round(peak[0] / 1024, 1), "stdout": output}


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid, *(below for child in children for below in tree(int(child)))]


def anonymous(pid: int) -> int:
    """KiB of memory that is no file's."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def prepare(data: Path, out: Path, jobs: int) -> dict:
    """`eyas prepare` with an empty cache, in as many processes even for little data."""
    for path in out.glob("*") if out.exists() else ():
        path.unlink()
    code = "import eyas.corpus.prepare as p, eyas.cli as c; p.ALONE_BYTES = 0; c.main()"
    asked = ["prepare", str(data), "--target", MODEL, "--out", str(out), "--jobs", str(jobs)]
    found = run([sys.executable, "-c", code, *asked])
    report = json.loads((out / "report.json").read_text())
    return {**found, **{key: report[key] for key in ("rows", "samples", "tokens", "supervised", "notes")}}


def rates(small: dict, large: dict) -> dict:
    """Tokens to a second, by the clock and by the processors, of what the large file has beyond the small one."""
    tokens = large["tokens"] - small["tokens"]
    return {name: round(tokens / (large[key] - small[key])) for name, key in (("clock", "wall"), ("processor", "cpu"))}


def main() -> None:
    """Run and write benchmarks/results/DATE-prepare-NAME.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--rows", default="1000,5000", help="of the small and of the large file")
    parser.add_argument("--words", type=int, default=220, help="in a conversation")
    parser.add_argument("--memory-rows", default="10000,100000")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=Path("/tmp/eyas-prepare"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    from transformers import AutoTokenizer

    from eyas.engines.fetch import fetch
    from eyas.progress import Silent

    folder = fetch(MODEL, Silent())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked.work.mkdir(parents=True, exist_ok=True)
    has_datasets = importlib.util.find_spec("datasets") is not None
    kinds: dict[str, list[dict]] = {"bare": [], "prepare": [], **({"map": []} if has_datasets else {})}
    out = asked.work / "out"
    for number, count in enumerate(map(int, asked.rows.split(","))):
        rows = conversations(count, asked.words, 0)
        data, texts = asked.work / "rows.jsonl", asked.work / "texts.json"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        texts.write_text(json.dumps(tokenizer.apply_chat_template([row["messages"] for row in rows], tokenize=False)))
        for kind, found in kinds.items():
            if kind == "prepare":
                found.append(prepare(data, out, asked.jobs))
            else:
                cache = asked.work / f"map-{os.getpid()}-{number}"
                more = [str(texts)] if kind == "bare" else [str(data), str(cache), str(asked.jobs)]
                measured = run([sys.executable, "-c", BARE if kind == "bare" else MAP, str(folder), *more])
                found.append(measured | {"tokens": int(measured.pop("stdout"))})
            found[-1].pop("stdout", None)
            print(kind, json.dumps(found[-1]), flush=True)
    memory = []
    for count in map(int, asked.memory_rows.split(",")):
        path = asked.work / "short.jsonl"
        with path.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in conversations(count, 16, count))
        memory.append(prepare(path, out, asked.jobs))
        memory[-1].pop("stdout")
        print("memory", json.dumps(memory[-1]), flush=True)
    found_rates = {kind: rates(*found) for kind, found in kinds.items()}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    written = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": {"name": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "load_average": os.getloadavg(),
        "tokens_per_second": found_rates,
        "share_of_bare": {
            name: round(found_rates["prepare"][name] / found_rates["bare"][name], 3) for name in ("clock", "processor")
        },
        "measured": kinds,
        "memory": memory,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{written['date']}-prepare-{asked.name}.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
