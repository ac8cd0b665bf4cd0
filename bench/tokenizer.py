#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Speed of `vjp tokenizer encode` beside the PyPI package `tokenizers`, both on one thread, on the same text.

    bench/tokenizer.py VJP [--megabytes 10] [--runs 3]      needs a Python that has tokenizers

The text is code and prose of this repository and of Python's standard library, with lines in other scripts. Documents of
about 50 kB each; the processor's time, the best of several runs; the tokens must be equal.
"""
import argparse
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import time

os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import test_tokenizer as made  # noqa: E402

# A few sentences in other scripts, from which lines are mixed.
WORDS = ("Все люди рождаются свободными и равными в своем достоинстве и правах " "人人生而自由 在尊严和权利上一律平等 "
         "すべての人間は 生まれながらにして自由であり " "모든 인간은 태어날 때부터 자유로우며 " "Alle Menschen sind frei und gleich an Würde geboren "
         "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι " "सभी मनुष्यों को गौरव और अधिकारों " "يولد جميع الناس أحرارا 😀 🎉 👍🏽").split()


def corpus(size):
    rng = random.Random(1)
    paths = sorted(glob.glob(os.path.join(ROOT, "src/**/*.[ch]"), recursive=True)) + sorted(glob.glob(os.path.join(ROOT, "docs/**/*.md"), recursive=True))
    paths += sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py"))) + sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*/*.py")))
    lines, total = [], 0
    for path in paths:
        for line in open(path, errors="replace"):
            lines.append(line.replace("\0", ""))
            total += len(lines[-1])
            if rng.random() < 0.05:
                lines.append(" ".join(rng.choices(WORDS, k=12)) + "\n")
                total += len(lines[-1].encode())
        if total > size:
            break
    text = "".join(lines)
    return [text[i:i + 50000] for i in range(0, len(text), 50000)]


def best(runs, action):
    taken = []
    for _ in range(runs):
        begun = time.process_time()
        result = action()
        taken.append(time.process_time() - begun)
    return min(taken), result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vjp")
    parser.add_argument("--megabytes", type=float, default=10)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=16000)
    arguments = parser.parse_args()
    documents = corpus(arguments.megabytes * 1e6)
    data = "\0".join(documents).encode() + b"\0"
    training = "".join(documents[::8])
    train = made.train
    made.train = lambda *a, **k: train(*a, **{**k, "size": arguments.vocab})
    print(f"{len(data) / 1e6:.1f} MB in {len(documents)} documents, vocabularies of {arguments.vocab}")
    print("| tokenizer | vjp MB/s | tokenizers MB/s | ratio |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "text")
        open(path, "wb").write(data)
        for make in (made.gpt2, made.llama3, made.qwen2, made.llama2, made.mistral):
            tokenizer = make(training)
            tokenizer.save(os.path.join(folder, "tokenizer.json"))
            theirs, count = float("inf"), 0
            for method in (tokenizer.encode_batch, tokenizer.encode_batch_fast):
                seconds, encoded = best(arguments.runs, lambda: method(documents, add_special_tokens=False))
                count = sum(len(e.ids) for e in encoded)
                theirs = min(theirs, seconds)
            command = [arguments.vjp, "tokenizer", "encode", folder, path, "-0", "--count", "--json"]
            said = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(arguments.runs)]
            ours = min(one["seconds"] for one in said)
            assert said[0]["tokens"] == count, (said[0]["tokens"], count)
            print(f"| {make.__name__} | {len(data) / ours / 1e6:.1f} | {len(data) / theirs / 1e6:.1f} | {theirs / ours:.1f} |", flush=True)


if __name__ == "__main__":
    main()
