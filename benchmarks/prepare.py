"""How fast `eyas prepare` is beside the bare tokenizer and beside datasets.map, and how much memory it takes.

    python benchmarks/prepare.py --name two-cores [--rows 20000] [--memory-rows 10000,100000] [--work DIR]

One run interleaves, over the same conversations (words of this repository's texts, two turns in a third of them): the
tokenizer's own `encode_batch` of the rendered texts, `eyas prepare` from the file to the samples, and, where `datasets`
is installed, `Dataset.map` with `apply_chat_template` in as many processes (ids alone, no mask). Each is a process of
its own, timed from its start; `seconds` less `start` (imports, tokenizer) is what rates are made of. Processor seconds
are those of the whole process tree: on a machine that others use they say more than the clock.
"""

import argparse
import datetime
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
import json, sys, time
began = time.time()
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1]).backend_tokenizer
texts = json.load(open(sys.argv[2]))
start = time.time()
tokens = 0
for first in range(0, len(texts), 1000):
    tokens += sum(len(one) for one in tokenizer.encode_batch(texts[first : first + 1000], add_special_tokens=False))
print(json.dumps({"tokens": tokens, "start": start - began, "seconds": time.time() - start}))
"""
MAP = """
import json, sys, time
began = time.time()
import datasets
from transformers import AutoTokenizer
datasets.disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
def render(row):
    return {"ids": tokenizer.apply_chat_template(row["messages"], return_dict=False)}
start = time.time()
rows = datasets.load_dataset("json", data_files=sys.argv[2], split="train", cache_dir=sys.argv[3])
made = rows.map(render, num_proc=int(sys.argv[4]), remove_columns=rows.column_names)
print(json.dumps({"rows": len(made), "start": start - began, "seconds": time.time() - start}))
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
    return {"wall": time.time() - began, "cpu": cpu, "peak_mib": peak[0] / 1024, "stdout": output}


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
    """`eyas prepare` with an empty cache."""
    for path in out.glob("*") if out.exists() else ():
        path.unlink()
    command = [sys.executable, "-m", "eyas", "prepare", str(data), "--target", MODEL, "--out", str(out)]
    found = run([*command, "--jobs", str(jobs)])
    report = json.loads((out / "report.json").read_text())
    keep = ("rows", "samples", "tokens", "supervised", "seconds", "notes")
    return {key: report[key] for key in keep} | {key: round(found[key], 3) for key in ("wall", "cpu", "peak_mib")}


def main() -> None:
    """Run and write benchmarks/results/DATE-prepare-NAME.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=220)
    parser.add_argument("--memory-rows", default="10000,100000")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=Path("/tmp/eyas-prepare"))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    from eyas.engines.fetch import fetch
    from eyas.progress import Silent

    folder = fetch(MODEL, Silent())
    asked.work.mkdir(parents=True, exist_ok=True)
    rows = conversations(asked.rows, asked.words, 0)
    data, texts = asked.work / "rows.jsonl", asked.work / "texts.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts.write_text(json.dumps(tokenizer.apply_chat_template([row["messages"] for row in rows], tokenize=False)))
    del rows
    rounds = []
    for _ in range(asked.rounds):
        bare = run([sys.executable, "-c", BARE, str(folder), str(texts)])
        ours = prepare(data, asked.work / "out", asked.jobs)
        rounds.append({"bare": json.loads(bare["stdout"]) | {"cpu": round(bare["cpu"], 3)}, "prepare": ours})
        print(json.dumps(rounds[-1]), flush=True)
    line = [sys.executable, "-m", "eyas", "prepare", str(data), "--target", MODEL, "--out", str(asked.work / "out")]
    again = run([*line, "--jobs", str(asked.jobs)])
    mapped = None
    try:
        import datasets
    except ImportError:
        print("datasets is not installed: no comparison with it", file=sys.stderr)
    else:
        cache = asked.work / f"map-{os.getpid()}"
        found = run([sys.executable, "-c", MAP, str(folder), str(data), str(cache), str(asked.jobs)])
        mapped = json.loads(found["stdout"]) | {"cpu": round(found["cpu"], 3), "datasets": datasets.__version__}
        print(json.dumps(mapped), flush=True)
    memory = []
    for count in map(int, asked.memory_rows.split(",")):
        path = asked.work / "short.jsonl"
        with path.open("w") as file:
            for row in conversations(count, 16, count):
                file.write(json.dumps(row) + "\n")
        memory.append(prepare(path, asked.work / "out", asked.jobs))
        print(json.dumps(memory[-1]), flush=True)
    # Of the last round's processor seconds, those of the start are what a file of one row takes.
    one = asked.work / "one.jsonl"
    one.write_text(json.dumps(conversations(1, 16, 0)[0]) + "\n")
    start = prepare(one, asked.work / "out", 1)
    bare_rate = max(entry["bare"]["tokens"] / entry["bare"]["seconds"] for entry in rounds)
    rate = max(entry["prepare"]["tokens"] / entry["prepare"]["seconds"] for entry in rounds)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    written = {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "device": {"name": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "rows": asked.rows,
        "bytes": data.stat().st_size,
        "rounds": rounds,
        "bare_tokens_per_second": round(bare_rate),
        "prepare_tokens_per_second": round(rate),
        "share_of_bare": round(rate / bare_rate, 3),
        "from_the_cache": {key: round(again[key], 3) for key in ("wall", "cpu")},
        "start": start,
        "datasets_map": mapped,
        "memory": memory,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / f"{written['date']}-prepare-{asked.name}.json"
    path.write_text(json.dumps(written, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
