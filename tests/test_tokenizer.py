#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares the tokens of `vjp tokenizer` with those of the PyPI package `tokenizers`.

    tests/test_tokenizer.py VJP FOLDER [NAME...]     tokenizers are left in FOLDER; NAMEs: only these

The tokenizers are made here with that package, one for each family that vjp reads, trained on this repository's own
text. Each encodes and decodes: every assigned character of every Unicode block, the repository's code, mixed and random
text, white space, emoji sequences, added tokens, marks in every order, and broken UTF-8. The package has no behaviour for
the last: it takes Python's str; vjp must give what it gives for bytes.decode("utf-8", "replace").
"""
import glob
import json
import os
import random
import shutil
import subprocess
import sys
import unicodedata

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CASES = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# ---- Texts ---------------------------------------------------------------------------------------------------------


def repository(limit):
    """Code and prose of this repository, in the order of its paths."""
    text = ""
    for pattern in ("docs/*.md", "src/*/*.c", "src/cpu/*/*.c", "scripts/*"):
        for path in sorted(glob.glob(os.path.join(ROOT, pattern))):
            if len(text) < limit and os.path.isfile(path):
                text += open(path, errors="replace").read()
    return text[:limit]


def newer_characters():
    """Characters on which the libraries may disagree because their Unicode data are of several versions: those since
    Unicode 14, which PCRE2 10.42 has, and marks since the older one that the package normalizes by."""
    same = unicodedata.unidata_version == "14.0.0"
    return {c for c in map(chr, range(0x110000)) if unicodedata.ucd_3_2_0.category(c) == "Cn" and (unicodedata.combining(c) or not same)}


def every_character(skip):
    """Every assigned character but those in `skip`, with a space and a newline now and then. Of ideographs and syllables,
    which are all alike, some."""
    alike = [range(0x3400, 0x4DC0), range(0x4E00, 0xA000), range(0xAC00, 0xD7A4), range(0x17000, 0x18D00), range(0x20000, 0x32000)]
    out = []
    for code in range(1, 0x110000):
        c = chr(code)
        if unicodedata.category(c) in ("Cn", "Cs", "Co") or c in skip:
            continue
        if code % 41 and any(code in some for some in alike):
            continue
        out.append(c)
        if code % 97 == 0:
            out.append(" ")
        if code % 1013 == 0:
            out.append("\n")
    return "".join(out)


def random_texts(rng, count, skip):
    pieces = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u180e", "'s", "'LL", "'\u017f", "don't", "I'VE", "_", "x1", "12345",
              "\u0661\u0662\u0663\u0664", "\u00bd", "\u2167", "\u4f60\u597d", "\u3042", "\uac00", "\u1100\u1161\u11a8", "e\u0301", "a\u0323\u0307", "a\u0307\u0323",
              "\u212b", "\u0958", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "\u2581", "\u2581\u2581", "<s>", "</s>", "<|end|>", "<|endoftext|>", "<tool>",
              " <tool> ", "word<tool>word", "<mask>", "  <mask>  ", "hello", "Hello", " the", "\u00e9\u00e8", "\ufffd", "\x01", "\x7f", "<0x0A>", "<unk>", "#!/", "==", "->", "\\", "\U00020000", "\u0130", "\u212a"]
    texts = ["", " ", "\n", "a", " a", "\u2581", "\u2581a", "<s>", "<s><s>", "a<tool>", "<mask>"]
    for _ in range(count):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 12)))
        if rng.random() < 0.3:
            text += "".join(chr(rng.choice((rng.randrange(1, 0x250), rng.randrange(0x300, 0x3000), rng.randrange(0x3000, 0xd800),
                                             rng.randrange(0x10000, 0x1ffff)))) for _ in range(rng.randint(1, 8)))
        texts.append("".join(c for c in text if c not in skip))
    return texts


def broken_bytes(rng, count):
    out = [b"\xff", b"a\xc3", b"\xe2\x96", b"\xf0\x9f\x98", b"\xc3(", b"\xa0\xa1", b"\xe2(\xa1", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf",
           b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf", b"\xf8\x88\x80\x80\x80", b"x\xe2\x96\x81\xe2\x96y", b"\xef\xbf", b"caf\xe9 au lait"]
    for _ in range(count):
        text = bytearray("na\u00efve \u4f60\u597d \U0001f600 abc".encode())
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            if rng.random() < 0.5:
                text[at] = rng.randrange(1, 256)
            else:
                del text[at]
        out.append(bytes(text).replace(b"\0", b""))
    return out


# ---- Tokenizers ----------------------------------------------------------------------------------------------------


def train(tokenizer, text, size=1200, alphabet=True, special=()):
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [])
    tokenizer.train_from_iterator([text], trainer)


def add_some(tokenizer):
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", single_word=True), AddedToken("hello", normalized=True), AddedToken("\u00e9", normalized=True),
                          AddedToken("  ", normalized=False), AddedToken("hell", normalized=False)])


def gpt2(text):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    train(t, text, special=["<|endoftext|>"])
    return t


def roberta_space(text):
    t = gpt2(text)
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    add_some(t)
    return t


def llama3(text):
    t = Tokenizer(models.BPE(ignore_merges=True))
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    train(t, text)
    t.add_special_tokens(["<|begin_of_text|>", "<|end|>"])
    begin = t.token_to_id("<|begin_of_text|>")
    t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", begin)])])
    return t


def qwen2(text):
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    train(t, text)
    add_some(t)
    return t


def smollm(text):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    train(t, text, special=["<|endoftext|>"])
    return t


def cases(text):
    """The expression with upper and lower case, and splits of every behaviour before it."""
    t = Tokenizer(models.BPE())
    split = pre_tokenizers.Split
    t.pre_tokenizer = pre_tokenizers.Sequence(
        [split(Regex(r"\p{N}{1,3}"), "isolated"), split("->", "merged_with_previous"), split("=", "merged_with_next"),
         split(Regex("[\u4e00-\u9fa5\u3040-\u309f]+"), "contiguous"), split(Regex(r"\w+"), "isolated", invert=True),
         split(Regex(r"[#!]"), "removed"), pre_tokenizers.Digits(individual_digits=False),
         split(Regex(CASES), "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    train(t, text)
    return t


def sentencepiece(text, **model):
    """A vocabulary as SentencePiece makes it: byte tokens first."""
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.pre_tokenizer = pre_tokenizers.Metaspace(split=True, prepend_scheme="never")
    train(t, text[:60000], alphabet=False, special=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)])
    made = json.loads(t.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in made["merges"]]
    return models.BPE(vocab=made["vocab"], merges=merges, unk_token="<unk>", **model)


def sentencepiece_decoder():
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def bos(t):
    t.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 1), ("</s>", 2)])


def llama2(text):
    t = Tokenizer(sentencepiece(text, byte_fallback=True, fuse_unk=True))
    t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    t.decoder = sentencepiece_decoder()
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    bos(t)
    return t


def mistral(text):
    t = Tokenizer(sentencepiece(text, byte_fallback=True, fuse_unk=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    t.decoder = sentencepiece_decoder()
    t.add_special_tokens(["<unk>", "<s>", "</s>"])
    add_some(t)
    bos(t)
    return t


def metaspace(text):
    t = Tokenizer(sentencepiece(text, fuse_unk=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    t.decoder = decoders.Metaspace()
    t.add_special_tokens(["<s>", "</s>"])
    return t


def unknown(text):
    """No byte fallback and one unknown token per character; merges across words, so that words cannot be divided."""
    t = Tokenizer(sentencepiece(text))
    model = json.loads(t.to_str())["model"]
    vocab = model["vocab"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    for left, right in (("e", "\u2581"), ("e\u2581", "t"), ("\u2581t", "h")):
        vocab.setdefault(left + right, len(vocab))
        merges.append((left, right))
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=False))
    t.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), "\u2581"), normalizers.NFC()])
    return t


MADE = [gpt2, roberta_space, llama3, qwen2, smollm, cases, llama2, mistral, metaspace, unknown]

# ---- Comparing -----------------------------------------------------------------------------------------------------


def run(vjp, arguments, data):
    done = subprocess.run([vjp, "tokenizer"] + arguments, input=data, capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"vjp tokenizer {' '.join(arguments)}: {done.stderr.decode(errors='replace')}")
    return done.stdout


def first_difference(text, ours, theirs, tokenizer):
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    show = lambda ids: [tokenizer.id_to_token(i) for i in ids[max(at - 3, 0):at + 5]]
    before = tokenizer.decode(theirs[:at])[-30:]
    return f"text {text[:60]!r} at token {at} after {before!r}: vjp {show(ours)}, the package {show(theirs)}"


def compare(vjp, folder, name, tokenizer, texts, broken):
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    wrong = []
    inputs = [text.encode() for text in texts] + broken
    strings = [data.decode("utf-8", "replace") for data in inputs]
    for special in (False, True):
        lines = run(vjp, ["encode", folder, "-0"] + ["--special"] * special, b"\0".join(inputs) + b"\0").decode().split("\n")[:-1]
        assert len(lines) == len(inputs), (len(lines), len(inputs))
        ours = [[int(word) for word in line.split()] for line in lines]
        theirs = [e.ids for e in tokenizer.encode_batch(strings, add_special_tokens=special)]
        wrong += [first_difference(s, a, b, tokenizer) for s, a, b in zip(strings, ours, theirs) if a != b]
        for skip in (False, True):
            data = "\n".join(" ".join(map(str, ids)) for ids in theirs).encode() + b"\n"
            out = run(vjp, ["decode", folder, "-0"] + ["--skip-special"] * skip, data).split(b"\0")[:-1]
            want = tokenizer.decode_batch(theirs, skip_special_tokens=skip)
            assert len(out) == len(want), (len(out), len(want))
            wrong += [f"decoded {s[:60]!r}: vjp {a.decode('utf-8', 'replace')[:80]!r}, the package {b[:80]!r}"
                      for s, a, b in zip(strings, out, want) if a.decode("utf-8", "replace") != b]
    return wrong


def compare_training(vjp, folder, text):
    """`vjp tokenizer train` makes the vocabulary and the merges that the package's trainer makes."""
    wrong = []
    path = os.path.join(folder, "text")
    with open(path, "wb") as out:
        out.write(text.encode())
    for name, expression in (("gpt2", None), ("llama3", LLAMA3)):
        out = os.path.join(folder, "trained-" + name)
        shutil.rmtree(out, ignore_errors=True)
        run(vjp, ["train", path, "-o", out, "--vocab", "1500", "--pattern", name, "--special", "<|one|>,<|two|>"], b"")
        t = Tokenizer(models.BPE())
        bytes_last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)
        t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(expression), "isolated"), bytes_last]) if expression else bytes_last
        train(t, text, size=1500, special=["<|endoftext|>", "<|one|>", "<|two|>"])
        theirs = json.loads(t.to_str())["model"]
        ours = json.loads(Tokenizer.from_file(os.path.join(out, "tokenizer.json")).to_str())["model"]
        wrong += [f"trained by {name}: other {what}" for what in ("vocab", "merges") if theirs[what] != ours[what]]
    return wrong


def main():
    vjp, folder = sys.argv[1:3]
    rng = random.Random(1)
    text = repository(120000)
    skip = newer_characters() | {"\0"}
    texts = [text, every_character(skip), text[:3000].replace(" ", ""), " " * 1000 + "x" + "\n" * 500, "ab" * 3000, "\u0301\u0323" * 200]
    texts += random_texts(rng, 600, skip)
    broken = broken_bytes(rng, 200)
    os.makedirs(folder, exist_ok=True)
    wrong = compare_training(vjp, folder, text + texts[1])
    print("\n".join(wrong) or "training: the package's tokens and merges")
    failed = len(wrong)
    for make in MADE:
        if len(sys.argv) > 3 and make.__name__ not in sys.argv[3:]:
            continue
        tokenizer = make(text)
        wrong = compare(vjp, os.path.join(folder, make.__name__), make.__name__, tokenizer, texts, broken)
        print(f"{make.__name__}: {len(texts) + len(broken)} texts, {len(wrong)} differ")
        for line in wrong[:5]:
            print("  " + line)
        failed += len(wrong) > 0
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
